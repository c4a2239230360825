"""A trainer that is killed again and again: a program, what starts it, what it shows.

    python -m tests.trainer.kills NUM_KILLS SEED FLAGS...

Each life is a fork of one process (see `tests.helpers.subprocesses`). Lives alternate:
one is killed from outside after a few steps, the next kills itself while a checkpoint
is written, at one of the moments at which its files reach the disk. After NUM_KILLS of
them the last may live to the end of the run.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers import fresh_processes, runs, subprocesses

_PATIENCE = 600.0


def check_that_kills_change_nothing(
    folder: Path, *, num_kills: int, num_steps: int, task: Sequence[str] = ()
) -> None:
    """Compares a run that is killed with one in peace, in all that they measure.

    Args:
        folder: Where both runs go.
        num_kills: How often one is killed.
        num_steps: Of both.
        task: Flags of the task, by default of a perceptron with dropout, whose state
            is nothing that a layer's weights show.
    """
    task = task or runs.flags(model__dropout=0.2)
    more = [f"training.num_steps={num_steps}", "optimizer.ema_decay=0.9"]
    flags = [*task, *(f"--set={each}" for each in more)]
    whole, killed = folder / "whole", folder / "killed"
    in_peace = _started(folder / "log-0", 0, [*flags, f"--logdir={whole}"])
    again = _started(folder / "log-1", num_kills, [*flags, f"--logdir={killed}"])
    with in_peace, again:
        for number, program in enumerate((in_peace, again)):
            log = folder / f"log-{number}"
            assert program.wait(_PATIENCE) == 0, log.read_text()
    said = (folder / "log-1").read_text()
    # Not always the last line: Python may warn of memory of processes that read ahead.
    *_, told = (line for line in said.splitlines() if line.startswith("kills: "))
    kills = json.loads(told.removeprefix("kills: "))
    assert sum(kills.values()) == num_kills
    assert min(kills.values()) >= num_kills // 3
    assert runs.timeless(killed) == runs.timeless(whole)
    assert len(runs.losses(killed)) == num_steps
    assert not list((killed / "checkpoints").glob(".writing*"))


def _started(log: Path, num_kills: int, flags: list[str]) -> fresh_processes.Program:
    return fresh_processes.start(__spec__.name, str(num_kills), "1", *flags, log=log)


def _last_step(folder: Path) -> int:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0


def _live(flags: list[str], death: int | None) -> int:
    """Runs the trainer in this process, up to the `death`-th file that is written."""
    from tfgpipe_trainer.checkpoint import store
    from tfgpipe_trainer.main import main

    flush, written = store.flush, 0

    def flush_or_die(path: Path) -> None:
        nonlocal written
        written += 1
        if written == death:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(path)

    store.flush = flush_or_die
    return main(["trainer", *flags])


def _main(num_kills: int, seed: int, flags: list[str]) -> None:
    import tensorflow as tf  # noqa: F401

    import tfgpipe_trainer.commands.runs  # noqa: F401

    chance = random.Random(seed)
    (logdir,) = (f.removeprefix("--logdir=") for f in flags if "--logdir=" in f)
    folder = Path(logdir)
    kills = {"steps": 0, "write": 0}
    while True:
        dead = sum(kills.values())
        how = None if dead >= num_kills else ("steps", "write")[dead % 2]
        death = chance.randint(1, 12) if how == "write" else None
        child = subprocesses.fork(functools.partial(_live, flags, death))
        begun = _last_step(folder)
        if how == "steps":
            wanted = begun + chance.randint(1, 6)
            while _last_step(folder) < wanted:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    raise SystemExit(f"A life ended by itself: {status}.")
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            kills[how or "steps"] += 1
        elif os.WEXITSTATUS(status) or how is None:
            print(f"kills: {json.dumps(kills)}")
            sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
