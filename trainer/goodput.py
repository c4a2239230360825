"""The time of a run, by its use, over all of its starts; a heartbeat; a watchdog.

    goodput.jsonl     a line for each start: {"start", "end", "first_step", "step",
                      "seconds": {USE: SECONDS}}
    heartbeat.json    {"step", "num_steps", "time"}, at most ten seconds old while steps
                      are made: for schedulers
    stacks-*.txt      stacks of all threads when no step has ended for too long

Goodput is the share of all time that went into steps which count (Google, "Goodput").
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfgpipe import cluster
from tfgpipe_trainer import files
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.devices import host_device
from tfgpipe_trainer.progress import report

if TYPE_CHECKING:
    import tensorflow as tf


STARTING, FIRST_STEP, STEPS = "start-up", "first steps, with tracing", "steps"
EVALUATION, SAVING, DATA = "evaluation", "copying for checkpoints", "waiting for data"
_FILE = "goodput.jsonl"
_FIELDS = {"start", "end", "first_step", "step", "seconds"}
# Seconds between two heartbeats.
_BEAT_SECONDS = 10.0


class Clock:
    """Books the time of a start of a run, and watches that it goes on.

    Args:
        folder: The run's folder.
        started: The time of the start, in seconds since 1970.
        first_step: Steps that were done before.
        num_steps: Steps of the run.
        minutes: Minutes without a step after which the process ends with status 75;
            None: never.
        end: Ends the process with a status.
    """

    def __init__(
        self,
        folder: Path,
        *,
        started: float,
        first_step: int,
        num_steps: int,
        minutes: float | None = None,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._folder, self._num_steps, self._minutes = folder, num_steps, minutes
        self._end = end
        before = _read(folder)
        self._row: dict[str, Any] = {
            "start": started,
            "end": time.time(),
            "first_step": first_step,
            "step": first_step,
            "seconds": {STARTING: time.time() - started},
        }
        self._rows = [*before, self._row]
        self._mark = self._written = time.monotonic()
        # When a step is thought to have begun, or None while none is to.
        self._since: float | None = None
        self._waited: Callable[[], float] = float

    def timed(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset, the waiting for whose batches is booked as such."""
        import tensorflow as tf

        with tf.device(host_device()):
            waited = tf.Variable(0.0, dtype=tf.float64, trainable=False)

        def note(asked: tf.Tensor, batch: Any) -> Any:
            waited.assign_add(tf.timestamp() - asked)
            return batch

        def taken() -> float:
            seconds = float(waited.numpy())
            waited.assign(0.0)
            return seconds

        self._waited = taken
        asked = tf.data.Dataset.range(1).repeat().map(lambda _: tf.timestamp())
        options = tf.data.Options()
        # A batch is asked for when a step needs it.
        options.experimental_optimization.inject_prefetch = False
        # Of the two it asks the first first.
        return tf.data.Dataset.zip((asked, dataset)).map(note).with_options(options)

    def begin(self, step: int) -> None:
        """Notes that a step begins: what has not been booked was starting."""
        if step == self._row["first_step"] + 1:
            self._book(STARTING)

    def end(self, step: int) -> None:
        """Notes that a step has ended."""
        name, seconds = self._step_name(), self._row["seconds"]
        self._book(name)
        waited = self._waited()
        if name == STEPS:
            seconds[STEPS] -= waited
            seconds[DATA] = seconds.get(DATA, 0.0) + waited
        self._row["step"] = step
        self._since = time.monotonic()
        if time.monotonic() - self._written >= _BEAT_SECONDS:
            self.write()

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Books the time inside, which the watchdog does not count."""
        since, self._since = self._since, None
        self._book(self._step_name())
        try:
            yield
        finally:
            self._book(name)
            self._since = since and time.monotonic()

    def _step_name(self) -> str:
        is_first = self._row["step"] == self._row["first_step"]
        return FIRST_STEP if is_first else STEPS

    def _book(self, name: str) -> None:
        now = time.monotonic()
        seconds = self._row["seconds"]
        seconds[name] = seconds.get(name, 0.0) + now - self._mark
        self._mark, self._row["end"] = now, time.time()

    def write(self) -> None:
        """Writes the files; a disk that is full costs these alone."""
        self._written = time.monotonic()
        beat = {
            "step": self._row["step"],
            "num_steps": self._num_steps,
            "time": self._row["end"],
        }
        lines = "".join(f"{json.dumps(row)}\n" for row in self._rows)
        with contextlib.suppress(OSError):
            store.atomic_write(self._folder / "heartbeat.json", json.dumps(beat))
            store.atomic_write(self._folder / _FILE, lines)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Ends the process if no step ends for too long, the first step aside."""
        over = threading.Event()

        def watch(seconds: float) -> None:
            while not over.wait(min(1.0, seconds / 4)):
                since = self._since
                if since is not None and time.monotonic() - since > seconds:
                    self._give_up()
                    return

        self.write()
        thread = None
        if self._minutes is not None:
            thread = threading.Thread(
                target=watch, args=[60 * self._minutes], daemon=True
            )
            thread.start()
        try:
            yield
        finally:
            self._since = None
            over.set()
            if thread is not None:
                thread.join()
            self.write()

    def _give_up(self) -> None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        path = self._folder / f"stacks-{now}.txt"
        with contextlib.suppress(OSError), path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        report(
            f"No step has ended for {self._minutes:g} minutes, since step "
            f"{self._row['step']}. Stacks of all threads are in {path}. The same "
            "command goes on from the last checkpoint."
        )
        self.write()
        self._end(cluster.EX_TEMPFAIL)

    def __str__(self) -> str:
        return table(self._rows)


def _read(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of earlier starts, without lines that are none."""
    path = folder / _FILE
    rows = files.json_lines(path) if path.is_file() else ()
    return [x for x in rows if isinstance(x, dict) and x.keys() >= _FIELDS]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of the time of a run, by its use.

    >>> first = {"start": 0, "end": 110, "first_step": 0, "step": 10}
    >>> second = {"start": 130, "end": 220, "first_step": 5, "step": 14}
    >>> print(table([
    ...     {**first, "seconds": {"start-up": 10, "steps": 100}},
    ...     {**second, "seconds": {"start-up": 10, "steps": 80}},
    ... ]))
    time of the run                0:03:40  100.0%
    steps                          0:02:10   59.1%
    start-up                       0:00:20    9.1%
    steps that were done again     0:00:50   22.7%
    between starts                 0:00:20    9.1%

    Args:
        rows: The starts, as in `goodput.jsonl`.
    """
    used: dict[str, float] = {STEPS: 0.0}
    for row in rows:
        for name, seconds in row["seconds"].items():
            used[name] = used.get(name, 0.0) + seconds
    again = idle = 0.0
    for row, later in itertools.pairwise(rows):
        idle += max(0.0, later["start"] - row["end"])
        done, lost = row["step"] - row["first_step"], row["step"] - later["first_step"]
        if done > 0 and lost > 0:
            again += row["seconds"].get(STEPS, 0.0) * min(1.0, lost / done)
    used[STEPS] -= again
    used |= {"steps that were done again": again, "between starts": idle}
    total = sum(used.values())
    shown = {"time of the run": total, **{n: x for n, x in used.items() if x > 0}}
    return "\n".join(
        f"{name:29}  {datetime.timedelta(seconds=round(seconds))!s:>7}  "
        f"{100 * seconds / total:5.1f}%"
        for name, seconds in shown.items()
    )
