"""Pictures of documents are shown."""

from __future__ import annotations

import pytest

from docs import pictures
from tests.helpers.documents import DOCUMENTS

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_there_and_small_and_shown(name):
    path = pictures.FOLDER / f"{name}.png"
    assert 0 < path.stat().st_size < 120_000
    texts = [path.read_text("utf-8") for path in DOCUMENTS]
    assert any(f"assets/{path.name})" in text for text in texts)


def test_a_command_draws_every_picture():
    drawn = {path.stem for path in pictures.FOLDER.glob("*.png")}
    assert drawn == {*pictures.PICTURES, *pictures.MEASURED}
