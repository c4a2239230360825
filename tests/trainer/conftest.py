"""What the trainer's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import runs


@pytest.fixture
def small() -> list[str]:
    """A command line of a very small run."""
    return ["trainer", *runs.flags()]


@pytest.fixture
def small_lm(tmp_path: Path) -> list[str]:
    """A command line that makes lm.Tiny very small, on a text made up for it."""
    return ["trainer", *runs.text_flags(tmp_path / "text")]
