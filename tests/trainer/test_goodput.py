"""The clock of a run: its table, heartbeat and watchdog."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import fresh_processes
from tests.trainer import runs
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.goodput import EVALUATION, Clock, table


def clock(folder: Path, **values: Any) -> Clock:
    given = {"started": time.time(), "first_step": 0, "num_steps": 4}
    return Clock(folder, **{**given, **values})


def step(own: Clock, number: int, seconds: float = 0.0) -> None:
    own.begin(number)
    time.sleep(seconds)
    own.end(number)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / "goodput.jsonl").read_text().splitlines()]


def test_time_is_booked_where_it_goes(tmp_path: Path) -> None:
    own = clock(tmp_path, started=time.time() - 10)
    with own.watched():
        own.begin(1)
        time.sleep(0.1)
        with own.use("copying for checkpoints"):
            pass
        own.end(1)
        step(own, 2, 0.05)
        with own.use(EVALUATION):
            time.sleep(0.2)
        step(own, 3, 0.05)
    (row,) = rows(tmp_path)
    assert (row["first_step"], row["step"]) == (0, 3)
    seconds = row["seconds"]
    assert seconds["start-up"] == pytest.approx(10, abs=0.1)
    assert seconds["first steps, with tracing"] == pytest.approx(0.1, abs=0.05)
    assert seconds["evaluation"] == pytest.approx(0.2, abs=0.05)
    assert seconds["steps"] == pytest.approx(0.1, abs=0.05)
    assert sum(seconds.values()) == pytest.approx(row["end"] - row["start"], abs=0.05)
    beat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert beat == {"step": 3, "num_steps": 4, "time": row["end"]}


def test_starts_add_up_and_what_is_lost_between_them_is_seen(tmp_path: Path) -> None:
    first = clock(tmp_path)
    with first.watched():
        for number in (1, 2, 3):
            step(first, number, 0.1)
    (tmp_path / "goodput.jsonl").open("a").write('{"torn')
    second = clock(tmp_path, first_step=2, started=time.time() + 60)
    with second.watched():
        step(second, 3)
    assert len(rows(tmp_path)) == 2
    lines = [" ".join(line.split()) for line in str(second).splitlines()]
    assert any(line.startswith("between starts 0:01:00") for line in lines)
    # Steps 2 and 3 took as long each, and step 3 was done again.
    lost = json.loads((tmp_path / "goodput.jsonl").read_text().splitlines()[0])
    assert lost["seconds"]["steps"] == pytest.approx(0.2, abs=0.05)
    assert any(line.startswith("steps that were done again") for line in lines)
    assert "steps that" not in table(rows(tmp_path)[1:])


def test_a_full_disk_costs_the_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "replace", full)
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
