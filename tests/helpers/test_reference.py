"""The reference that pipelines are compared with shares no code with them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
ALLOWED = {"__future__", "collections", "dataclasses", "functools", "math", "typing"}
ALLOWED |= {"keras", "numpy", "tensorflow"}


def test_the_reference_imports_nothing_of_the_library():
    """Nor another helper, which might."""
    tree = ast.parse((HELPERS / "reference.py").read_text("utf-8"))
    names = [
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert {name.partition(".")[0] for name in names} <= ALLOWED
    assert "keras.src" not in names
