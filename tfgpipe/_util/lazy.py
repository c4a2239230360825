"""Lazy exports: names of a package, loaded from their modules on first use.

For packages that are of use without TensorFlow and have modules that import it. Type
checkers find the same names under `if TYPE_CHECKING:`; a test compares the two.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(
    package: str,
    *,
    submodules: str = "",
    replaced: Mapping[str, str] | None = None,
    **names: str,
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: `__name__` in its `__init__`.
        submodules: The modules that are exported themselves, with spaces between.
        replaced: Names that are gone, each with what to use in its place.
        **names: By module, the names to load from it, with spaces between.

    Example:

        __all__, __getattr__, __dir__ = lazy_exports(__name__, mesh="Mesh make_mesh")
    """
    modules = {name: module for module in names for name in names[module].split()}
    exported = sorted([*submodules.split(), *modules])

    def load(name: str) -> Any:
        if name not in exported:
            advice = f". Use {replaced[name]}." if replaced and name in replaced else ""
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{advice}"
            )
        module = importlib.import_module(f"{package}.{modules.get(name, name)}")
        return getattr(module, name) if name in modules else module

    return exported, load, lambda: exported
