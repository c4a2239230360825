"""Tables and numbers as text."""

from __future__ import annotations

import pytest

from tfgpipe._util.text import readable_bytes, readable_count

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3.5e12, "3.2 TiB")],
)
def test_bytes_are_readable(count, text):
    assert readable_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999.4, "999"), (999.6, "1.0 k"), (99_960, "100 k"), (2e18, "2000 P")],
)
def test_counts_are_readable(count, text):
    assert readable_count(count) == text
