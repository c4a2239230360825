"""A run that is killed at any instant goes on as if nothing had been."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import mixed, runs
from tests.helpers.subprocesses import python
from tests.trainer import kills


def test_a_run_killed_four_times_measures_what_one_in_peace_does(
    tmp_path: Path,
) -> None:
    kills.check_that_kills_change_nothing(tmp_path, num_kills=4, num_steps=40)


def _images(folder: Path) -> list[str]:
    random = np.random.default_rng(0)
    x = random.integers(0, 256, [60, 8, 8], np.uint8)
    np.savez(folder / "images.npz", x=x, y=np.arange(60) % 4)
    own = [f"--set=data.files={folder / 'images.npz'}", "--set=augmentation.shift=1"]
    return ["--params=image.Digits", *runs.small_flags(), *own]


TASKS: dict[str, Callable[[Path], list[str]]] = {
    "perceptron": lambda _: [],
    "text": lambda folder: runs.text_flags(folder / "corpus.txt"),
    "packed text": lambda folder: [
        *runs.text_flags(folder / "corpus.txt"),
        "--set=data.documents=packed",
    ],
    "images": _images,
    "mixture": lambda _: [
        *(f"--params={mixed.__name__}.Mixed", "--set=width=8", *runs.small_flags())
    ],
}


@pytest.mark.nightly
@pytest.mark.parametrize("task", TASKS)
def test_a_run_killed_twenty_times_measures_what_one_in_peace_does(
    task: str, tmp_path: Path
) -> None:
    kills.check_that_kills_change_nothing(
        tmp_path, num_kills=20, num_steps=80, task=TASKS[task](tmp_path)
    )


@pytest.mark.nightly
def test_processes_that_read_ahead_change_nothing(tmp_path: Path) -> None:
    kills.check_that_kills_change_nothing(
        tmp_path,
        num_kills=4,
        num_steps=24,
        task=runs.flags(model__dropout=0.2, training__num_workers=2),
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


@pytest.mark.nightly
def test_processes_that_read_ahead_end_with_the_trainer(tmp_path: Path) -> None:
    program = tmp_path / "reader.py"
    program.write_text(READER)
    run = python(str(program))
    assert run.returncode == -signal.SIGKILL
    workers = [int(pid) for pid in run.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
