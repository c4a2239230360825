"""A run of the trainer on workers, of which some are killed."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers import runs
from tests.helpers.processes import (
    CLUSTER,
    PATIENCE,
    arguments,
    descendants,
    none_of,
    running,
    wait_for,
)
from tfgpipe_trainer.main import main


def check_that_kills_change_no_loss(
    folder: Path,
    kills: Sequence[str],
    draw: random.Random,
    *,
    num_workers: int,
    num_steps: int,
    seconds: float,
) -> None:
    """Compares a run on workers with one on this process' own devices.

    Args:
        folder: Where both runs go.
        kills: What is killed, in turn: "worker", "server" or "client".
        draw: Draws the moments.
        num_workers: As many as stages.
        num_steps: Of a run.
        seconds: The longest time between two kills, beside that of 8 steps.
    """
    whole, killed, log = folder / "whole", folder / "killed", folder / "log"
    flags = runs.text_flags(
        folder / "text",
        model__dropout=0.2,  # Whose seeds go on as well.
        pipelining__num_stages=num_workers,
        pipelining__num_microbatches=3,
        training__batch_size=3,
        training__num_steps=num_steps,
        checkpoint__every_steps=5,
    )
    command = [
        *(*CLUSTER, "launch", f"--workers={num_workers}"),
        *(f"--log_dir={folder / 'logs'}", "--"),
        *(sys.executable, "-m", "trainer", *flags, f"--logdir={killed}"),
    ]
    with running(command, log=log) as supervisor:
        for number, kill in enumerate(kills):
            if number % 2:  # Whatever it is about to do then.
                time.sleep(draw.uniform(0, seconds))
            else:  # While it trains.
                if number:
                    time.sleep(3)  # What was killed last says nothing more.
                steps = log.read_text().count(f"/{num_steps}") if number else 0
                wait_for(f"/{num_steps}", log, count=steps + 8)  # One is saved.
                time.sleep(draw.uniform(0, seconds / 6))
            pid = _target(supervisor.pid, kill, draw)
            while pid is None:
                assert supervisor.poll() is None, log.read_text()
                time.sleep(0.1)
                pid = _target(supervisor.pid, kill, draw)
            os.kill(pid, signal.SIGKILL)
        assert supervisor.poll() is None, "it ended before the last kill"
        pids = descendants(supervisor.pid)
        assert supervisor.wait(2 * PATIENCE) == 0, log.read_text()
        assert none_of(pids)
    # The same on this process' own devices, without a kill.
    assert main(["trainer", *flags, f"--logdir={whole}"]) == 0
    assert _records(killed) == _records(whole)
    assert len(_records(whole)) == num_steps + 1
    assert "Going on from step " in log.read_text()


def _records(folder: Path) -> list[dict[str, float]]:
    kept = ("step", "loss", "learning_rate", "validation_model")
    return [{k: v for k, v in x.items() if k in kept} for x in runs.records(folder)]


def _target(supervisor: int, what: str, draw: random.Random) -> int | None:
    """Returns a process to kill, if there is one now."""
    words = {"worker": "tfgpipe.cluster worker", "server": "tfgpipe.cluster server"}
    word = words.get(what, "trainer")
    pids = [pid for pid in descendants(supervisor) if word in arguments(pid)]
    return draw.choice(pids) if pids else None
