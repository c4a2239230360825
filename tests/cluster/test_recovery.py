"""A kill in the middle of a run on workers: the loss goes on as without it."""

from __future__ import annotations

import random
from pathlib import Path

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
