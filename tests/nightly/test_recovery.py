"""Kills at random moments of a run on workers: the loss goes on as without them."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.cluster import recovery


def test_five_kills_at_random_moments_change_no_loss(tmp_path: Path) -> None:
    draw = random.Random(os.environ.get("TFGPIPE_KILLS", "1"))
    kills = ["worker", "server", "client", "server", "worker"]
    draw.shuffle(kills)
    recovery.check_that_kills_change_no_loss(
        tmp_path, kills, draw, num_workers=3, num_steps=300, seconds=12
    )
