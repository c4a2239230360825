"""Pictures of documents are shown."""

from __future__ import annotations

import pytest

from docs import pictures


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_there_and_small_and_shown(name):
    assert 0 < (pictures.FOLDER / name).stat().st_size < 120_000
    documents = [pictures.FOLDER.parent / "README.md", *pictures.FOLDER.rglob("*.md")]
    texts = [path.read_text("utf-8") for path in documents]
    assert any(f"/{name})" in text or f"]({name})" in text for text in texts)
