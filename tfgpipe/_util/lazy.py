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
    modules = _imports(inspect.getsource(sys.modules[package]), package)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        if module == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(module), name)

    return sorted(modules), load, lambda: sorted(modules)


def _imports(source: str, package: str) -> dict[str, str]:
    """Returns by name the module that it is imported from.

    Those that the package imports at once are among them: classes that Keras must know
    to load files with them.

    >>> _imports("if TYPE_CHECKING: from a.b import C as C", "a")
    {'C': 'a.b'}
    """
    tree = ast.parse(source)
    branches = [node.body for node in tree.body if isinstance(node, ast.If)]
    nodes = [node for branch in (tree.body, *branches) for node in branch]
    return {
        alias.name: str(node.module)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        if node not in tree.body or f"{node.module}.".startswith(f"{package}.")
        for alias in node.names
        if alias.asname == alias.name
    }
