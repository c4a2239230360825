"""What tests of language models share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A text in which `a` is followed by b and c in turn: bigrams cannot tell."""
    (tmp_path / "text").write_bytes(b"abac" * 2000)
    return f"data.files={tmp_path}/text"
