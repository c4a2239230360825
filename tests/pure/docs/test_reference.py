"""Docstrings become Markdown, and pictures of documents are shown."""

from __future__ import annotations

import pytest

from docs import pictures, reference


@pytest.mark.parametrize(
    ("docstring", "wanted"),
    [
        ("Adds.\n\nTo all.", "Adds.\n\nTo all."),
        (
            "Adds.\n\n    Args:\n        x: One,\n            or none.\n"
            "        **rest: More.\n",
            "Adds.\n\n**Arguments**\n\n- `x`: One,\n  or none.\n- `**rest`: More.",
        ),
        ("Adds.\n\n>>> 1\n1", "Adds.\n\n```pycon\n>>> 1\n1\n```"),
        ("As:\n\n    a  b\n\n    c\n\nAnd.", "As:\n\n```text\na  b\n\nc\n```\n\nAnd."),
        ("Input shape:\n    `(batch, n)`", "**Input shape**\n\n`(batch, n)`"),
        ("So:\n\n```python\na\n\nb\n```", "So:\n\n```python skip\na\n\nb\n```"),
    ],
)
def test_a_docstring_as_markdown(docstring, wanted):
    assert reference.markdown(docstring) == wanted


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_there_and_small_and_shown(name):
    assert 0 < (pictures.FOLDER / name).stat().st_size < 120_000
    texts = [path.read_text("utf-8") for path in pictures.FOLDER.glob("*.md")]
    assert any(f"]({name})" in text for text in texts)
