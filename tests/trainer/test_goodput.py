"""The clock of a run: its table, heartbeat and watchdog."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.helpers import fresh_processes, runs
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.goodput import EVALUATION, Clock, table


class Time:
    """Time that goes by when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Time:
    own = Time()
    monkeypatch.setattr("tfgpipe_trainer.goodput.time", own)
    return own


def clock(folder: Path, **values: Any) -> Clock:
    given = {"started": time.time(), "first_step": 0, "num_steps": 4}
    return Clock(folder, **{**given, **values})


def step(own: Clock, number: int, seconds: float = 0.0, *, of: Any = time) -> None:
    own.begin(number)
    of.sleep(seconds)
    own.end(number)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / "goodput.jsonl").read_text().splitlines()]


def test_time_is_booked_where_it_goes(tmp_path: Path, fake: Time) -> None:
    own = clock(tmp_path, started=fake.time() - 10)
    with own.watched():
        own.begin(1)
        fake.sleep(4)
        with own.use("copying for checkpoints"):
            fake.sleep(1)
        own.end(1)
        step(own, 2, 2, of=fake)
        with own.use(EVALUATION):
            fake.sleep(8)
        step(own, 3, 3, of=fake)
    (row,) = rows(tmp_path)
    assert (row["first_step"], row["step"]) == (0, 3)
    assert row["seconds"] == {
        "start-up": 10,
        "first steps, with tracing": 4,
        "copying for checkpoints": 1,
        "evaluation": 8,
        "steps": 5,
        "waiting for data": 0,
    }
    assert row["end"] - row["start"] == 28
    beat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert beat == {"step": 3, "num_steps": 4, "time": row["end"]}


def test_starts_add_up_and_what_is_lost_between_them_is_seen(
    tmp_path: Path, fake: Time
) -> None:
    first = clock(tmp_path, started=fake.time())
    with first.watched():
        for number in (1, 2, 3):
            step(first, number, 20, of=fake)
    (tmp_path / "goodput.jsonl").open("a").write('{"torn')
    fake.sleep(60)
    second = clock(tmp_path, first_step=2, started=fake.time())
    with second.watched():
        step(second, 3, 5, of=fake)
    assert len(rows(tmp_path)) == 2
    lines = [" ".join(line.split()) for line in str(second).splitlines()]
    assert any(line.startswith("between starts 0:01:00") for line in lines)
    # Of three steps one was done again: a third of the time of the later two.
    assert rows(tmp_path)[0]["seconds"]["steps"] == 40
    assert "steps that were done again 0:00:13 10.7%" in lines
    assert "steps that" not in table(rows(tmp_path)[1:])


def test_steps_that_wait_for_data_are_known_from_those_that_compute(
    tmp_path: Path,
) -> None:
    def slow(number: tf.Tensor) -> tf.Tensor:
        time.sleep(0.1)
        return number

    numbers = tf.data.Dataset.range(6)
    late = numbers.map(lambda x: tf.numpy_function(slow, [x], tf.int64))
    seconds = {}
    for name, dataset, lasts in (("late", late, 0.0), ("there", numbers, 0.1)):
        (tmp_path / name).mkdir()
        own = clock(tmp_path / name)
        found = []
        with own.watched():
            for number, batch in enumerate(own.timed(dataset), start=1):
                step(own, number, lasts)
                found.append(int(batch))
        assert found == [*range(6)]
        assert own.timed(dataset).cardinality() == 6
        (row,) = rows(tmp_path / name)
        seconds[name] = row["seconds"]
    # A sleep may last longer, and never shorter.
    assert seconds["late"]["waiting for data"] > 0.4 > seconds["late"]["steps"]
    assert seconds["there"]["steps"] > 0.4 > seconds["there"]["waiting for data"]


def test_a_full_disk_costs_the_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "atomic_write", full)
    own = clock(tmp_path)
    with own.watched():
        step(own, 1)
    assert not list(tmp_path.iterdir())


def test_the_watchdog_counts_neither_the_first_step_nor_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    own = clock(tmp_path, minutes=0.3 / 60, end=ended.append)
    with own.watched():
        step(own, 1, 0.6)
        with own.use(EVALUATION):
            time.sleep(0.6)
        assert ended == []
        step(own, 2)
        time.sleep(0.8)
    assert ended == [75]
    (stacks,) = tmp_path.glob("stacks-*.txt")
    assert "test_the_watchdog_counts" in stacks.read_text()
    assert "since step 2. Stacks of all threads are in" in capsys.readouterr().err


def test_a_run_that_hangs_ends_with_status_75(tmp_path: Path) -> None:
    flags = [*runs.flags(), "--set=training.watchdog_minutes=0.01"]
    log = tmp_path / "log"
    with fresh_processes.start(
        "tests.trainer.slow_run",
        *flags,
        f"--logdir={tmp_path / 'run'}",
        log=log,
        STEP_SECONDS="600",
        STEPS_BEFORE="1",
    ) as trainer:
        assert trainer.wait(120) == 75, log.read_text()
    assert "No step has ended for 0.01 minutes, since step 1." in log.read_text()
    assert list((tmp_path / "run").glob("stacks-*.txt"))
