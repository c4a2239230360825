"""Modules of the checkout, and what they import."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.helpers.subprocesses import ROOT


@functools.cache
def modules(top: str) -> dict[str, Path]:
    """Returns the modules of a top-level package, `a.b` for `top/a/b.py`."""
    folder = ROOT / top
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): path
        for path in sorted(folder.rglob("*.py"))
    }


def package(name: str) -> str:
    """Returns the package of a module, which is itself if it is at the top."""
    return name.partition(".")[0]


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Returns all imported names, dotted: those of `from a import b` as `a.b`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: relative import"
            if node.module != "__future__":
                found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)
