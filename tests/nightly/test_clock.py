"""`tests/runtime/test_timer.py` for the other schedules."""

from __future__ import annotations

import pytest

from tests.runtime import test_timer as short


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_recorded_step_follows_its_schedule(schedule):
    short.test_a_recorded_step_follows_its_schedule(schedule)
