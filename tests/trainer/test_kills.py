"""A run that is killed at any instant goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path

from tests.trainer import kills


def test_a_run_killed_four_times_measures_what_one_in_peace_does(
    tmp_path: Path,
) -> None:
    kills.check_that_kills_change_nothing(tmp_path, num_kills=4, num_steps=40)
