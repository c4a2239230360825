"""Kills in the middle of a run on workers: the loss goes on as without them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.cluster import recovery


def test_a_kill_changes_no_loss(tmp_path: Path) -> None:
    recovery.check_that_kills_change_no_loss(
        tmp_path,
        ["server"],
        random.Random(1),
        num_workers=2,
        num_steps=60,
        seconds=0.5,
    )


@pytest.mark.nightly
def test_five_kills_at_random_moments_change_no_loss(tmp_path: Path) -> None:
    draw = random.Random(os.environ.get("TFGPIPE_KILLS", "1"))
    kills = ["worker", "server", "client", "server", "worker"]
    draw.shuffle(kills)
    recovery.check_that_kills_change_no_loss(
        tmp_path, kills, draw, num_workers=3, num_steps=300, seconds=12
    )
