"""A run that is killed at any instant goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.trainer import kills


def test_a_run_killed_twenty_times_measures_what_one_in_peace_does(
    tmp_path: Path,
) -> None:
    kills.check_that_kills_change_nothing(tmp_path, num_kills=20, num_steps=80)


def test_processes_that_read_ahead_change_nothing(tmp_path: Path) -> None:
    kills.check_that_kills_change_nothing(
        tmp_path, num_kills=4, num_steps=24, num_workers=2
    )


READER = """
import multiprocessing, os, signal, sys
import numpy as np
from tfgpipe_trainer import batches

if __name__ == "__main__":
    steps = range(1, 1000)
    dataset = batches.from_function(np.ones, steps, num_workers=2, any_size=True)
    iterator = iter(dataset)
    next(iterator)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_that_read_ahead_end_with_the_trainer(tmp_path: Path) -> None:
    program = tmp_path / "reader.py"
    program.write_text(READER)
    run = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL
    workers = [int(pid) for pid in run.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
