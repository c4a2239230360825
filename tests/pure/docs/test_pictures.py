"""Pictures of documents are shown."""

from __future__ import annotations

import pytest

from docs import pictures
from tests.pure.docs.test_documents import DOCUMENTS


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_there_and_small_and_shown(name):
    assert 0 < (pictures.FOLDER / name).stat().st_size < 120_000
    texts = [path.read_text("utf-8") for path in DOCUMENTS]
    assert any(f"/{name})" in text or f"]({name})" in text for text in texts)
