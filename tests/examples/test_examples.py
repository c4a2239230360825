"""Examples that run in seconds print what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.examples import EXAMPLES, SLOW, assert_prints_what_it_promises

PICTURES = {"own_schedule": "schedule.png", "unet": "unet.png"}


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - SLOW))
def test_an_example_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    assert_prints_what_it_promises(name, tmp_path)
    if name in PICTURES:
        assert (tmp_path / PICTURES[name]).read_bytes().startswith(b"\x89PNG")
