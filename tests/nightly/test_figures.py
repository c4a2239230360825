"""The large pictures can be read, too."""

from __future__ import annotations

import pytest

from tests.report.test_plots import (
    LARGE,
    assert_numbers_are_inside,
    assert_written_and_readable,
    render,
)


@pytest.mark.parametrize("name", LARGE)
def test_a_large_picture_can_be_read(name, tmp_path):
    picture = render(name, LARGE[name], tmp_path)
    assert_written_and_readable(picture)
    if name == "1f1b, large":
        assert_numbers_are_inside(picture)
