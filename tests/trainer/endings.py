"""Runs that end while a slow function of theirs makes batches, in all the ways.

    python -m tests.trainer.endings FOLDER FLAGS...

prints a line of JSON: for each way the exit status and the seconds from the event to
the end of the process. Each run is a fork of this process, which has TensorFlow
imported, and comes to the end of Python as `python -m trainer` does.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import numpy as np

# Longer than it takes to end, and shorter than all that is waited for.
_SLEEP = 0.5
_LIMIT = 120.0
_STEP = 3
WAYS = ("sigterm", "two_signals", "bad_records", "divergence")


def _train(way: str, folder: Path, flags: list[str]) -> None:
    """Trains up to an event, and goes on to the end of Python."""
    from tfgpipe_params.image import image_examples
    from tfgpipe_trainer import main
    from tfgpipe_trainer.hyperparams import HyperparameterError
    from tfgpipe_trainer.progress import Measurement, Progress

    event, made = folder / f"{way}.event", itertools.count(1)
    take, show, failed = image_examples.ImageExamples.take, Progress.show, main._failed

    def slow_take(
        self: image_examples.ImageExamples, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        spoilt = next(made) >= _STEP
        time.sleep(_SLEEP)
        if way == "bad_records" and spoilt:
            raise HyperparameterError("data.max_bad_records: expected fewer.")
        pixels, labels = take(self, indices)
        if way == "divergence" and spoilt:
            pixels = np.full_like(pixels, np.inf)
        return pixels, labels

    def show_and_ask(self: Progress, measurement: Measurement) -> None:
        show(self, measurement)
        if measurement.step == _STEP and way in ("sigterm", "two_signals"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    def failed_and_asked(status: int, message: str) -> int:
        event.touch()
        if way == "two_signals":
            interrupt()  # Before the message, and again while the process ends.
            atexit.register(interrupt)
        return failed(status, message)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

    image_examples.ImageExamples.take = slow_take
    Progress.show = show_and_ask
    main._failed = failed_and_asked
    sys.argv = ["trainer", *flags, f"--logdir={folder / way}"]
    runpy.run_module("trainer", run_name="__main__")


def _main(folder: Path, flags: list[str]) -> None:
    import tensorflow as tf  # noqa: F401

    import tfgpipe_trainer.commands.runs  # noqa: F401

    children = {}
    for way in WAYS:
        child = os.fork()
        if not child:
            log = os.open(folder / f"{way}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            _train(way, folder, flags)
            return
        children[way] = child
    ended: dict[str, list[float]] = {}
    deadline = time.monotonic() + _LIMIT
    while len(ended) < len(children):
        for way in children.keys() - ended.keys():
            if time.monotonic() > deadline:
                os.kill(children[way], signal.SIGKILL)
            done, status = os.waitpid(children[way], os.WNOHANG)
            event = folder / f"{way}.event"
            if done and event.exists():
                seconds = time.time() - event.stat().st_mtime
                ended[way] = [os.waitstatus_to_exitcode(status), seconds]
            elif done:
                ended[way] = [os.waitstatus_to_exitcode(status), -1]
        time.sleep(0.05)
    print(json.dumps(ended))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
