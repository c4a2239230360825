"""Lazy exports: the names of a package, loaded from their modules on first use.

The imports under `if TYPE_CHECKING:` in a package's `__init__` are the table, read from
its source, so that names are listed once and type checkers see them (as SPEC 1 of
Scientific Python does with stub files).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazy_exports(
    package: str,
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: Its name, `__name__` in its `__init__`.

    Example:

        if TYPE_CHECKING:
            from tfgpipe.devices.mesh import Mesh as Mesh

        __all__, __getattr__, __dir__ = lazy_exports(__name__)
    """
    modules = _imports(inspect.getsource(sys.modules[package]))

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        if module == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(module), name)

    return sorted(modules), load, lambda: sorted(modules)


def _imports(source: str) -> dict[str, str]:
    """Returns by name the module that it is imported from for type checkers.

    >>> _imports('if TYPE_CHECKING: from a.b import C as C')
    {'C': 'a.b'}
    """
    return {
        alias.name: str(node.module)
        for branch in ast.parse(source).body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
