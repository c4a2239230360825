"""Lazy exports: the names of a package, loaded from their modules on first use.

The imports under `if TYPE_CHECKING:` in a package's `__init__` are the table, so that
names are listed once and type checkers see them (as SPEC 1 of Scientific Python does
with stub files). They are read from its code rather than its source, which is not there
where only compiled files are installed.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any


def lazy_exports(
    package: str,
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__all__`, `__getattr__` and `__dir__` of the package that calls this.

    Args:
        package: Its name, `__name__` in its `__init__`.

    Example:

        if TYPE_CHECKING:
            from tfgpipe.devices.mesh import Mesh as Mesh

        __all__, __getattr__, __dir__ = lazy_exports(__name__)
    """
    frame = inspect.currentframe()
    assert frame is not None  # CPython has it.
    assert frame.f_back is not None
    modules = _imports(frame.f_back.f_code, package)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        if module == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(module), name)

    return sorted(modules), load, lambda: sorted(modules)


def _imports(code: CodeType, package: str) -> dict[str, str]:
    """Returns by name the module that it is imported from.

    Those that the package imports at once from its public modules are among them:
    classes that Keras must know to load files with them.

    >>> _imports(compile("if TYPE_CHECKING: from a.b import C", "", "exec"), "a")
    {'C': 'a.b'}
    """
    modules = {}
    condition = module = ""
    end_of_branch = 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_NAME":
            condition = instruction.argval
        elif instruction.opcode in dis.hasjrel and condition == "TYPE_CHECKING":
            end_of_branch = instruction.argval
        elif instruction.opname == "IMPORT_NAME":
            module = instruction.argval
        elif instruction.opname == "IMPORT_FROM":
            inner = module.removeprefix(f"{package}.")
            is_public = inner != module and not inner.startswith("_")
            if is_public or instruction.offset < end_of_branch:
                modules[instruction.argval] = module
    return modules
