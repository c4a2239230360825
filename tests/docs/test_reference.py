"""The reference is made of the docstrings."""

from __future__ import annotations

from docs import reference


def test_the_file_is_what_the_docstrings_say():
    written = reference.PATH.read_text("utf-8")
    assert written == reference.page(), "Run `make docs`."
