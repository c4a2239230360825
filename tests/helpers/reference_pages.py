"""The pages of the reference of the Python API."""

from __future__ import annotations

import importlib
import re
from typing import Any

from tests.helpers.subprocesses import ROOT

PAGES = ROOT / "docs" / "reference" / "api"


def documented() -> dict[str, Any]:
    """Returns what the pages describe, by the names that they have there."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(PAGES.glob("*.md")))
    names = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert len(set(names)) == len(names)
    return {name: _found(name) for name in names}


def _found(name: str) -> Any:
    package, _, inner = name.rpartition(".")
    return getattr(importlib.import_module(package), inner)
