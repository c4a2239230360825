"""Runs for all combinations of values: `--sweep=optimizer.learning_rate=1e-4,3e-4`.

Each combination is a run of its own, in a process of its own, in a folder below that of
the sweep. One after another, or with `--sweep_index=I` the I-th alone, as a job of an
array of jobs. A sweep that is given again goes on, and prints the table anew.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any

from tfgpipe import cluster
from tfgpipe_trainer import files, hyperparams
from tfgpipe_trainer.errors import UsageError
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.writers import read_metrics

# After these the same command goes on.
_STOPPED = (cluster.EXIT_PREEMPTED, cluster.EX_TEMPFAIL)
_DIVERGED = 3


@dataclasses.dataclass(frozen=True)
class Combination:
    """Values of the hyperparameters of a sweep.

    Attributes:
        assignments: Such as `("optimizer.learning_rate=1e-4",)`.
    """

    assignments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return ",".join(self.assignments).replace("/", "_")


def combinations(swept: Sequence[str]) -> list[Combination]:
    """Returns all combinations of values.

    >>> [each.name for each in combinations(["seed=0,1", "model.channels=(8,8),(16,)"])]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['seed=0,model.channels=(8,8)', 'seed=0,model.channels=(16,)',
     'seed=1,model.channels=(8,8)', 'seed=1,model.channels=(16,)']

    Args:
        swept: `NAME=VALUE,VALUE`, where commas in brackets or quotes divide nothing.

    Raises:
        UsageError: If one is not of this form.
    """
    columns = []
    for text in swept:
        name, equals, values = text.partition("=")
        if not (name and equals and values):
            raise UsageError(
                "Expected --sweep=NAME=VALUE,VALUE, such as "
                f"--sweep=optimizer.learning_rate=1e-4,3e-4; received {text!r}."
            )
        columns.append([f"{name}={value}" for value in _split(values)])
    return [Combination(row) for row in itertools.product(*columns)]


def _split(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if character == "," and not (depth or quote):
            parts.append("")
        else:
            parts[-1] += character
    return parts


def run(
    experiment: Experiment,
    swept: Sequence[str],
    *,
    logdir: str,
    index: int | None,
    arguments: Sequence[str],
) -> int:
    """Makes the runs of a sweep, prints their results, and returns an exit status.

    Args:
        experiment: The experiment, without the values of the sweep.
        swept: `NAME=VALUE,VALUE` for each hyperparameter.
        logdir: The folder of the sweep.
        index: The run to make, from 0, or None for all.
        arguments: The command line without what is about the sweep and its folder.

    Raises:
        UsageError: If there is no such run.
        HyperparameterError: If a combination is none of the experiment.
    """
    found = combinations(swept)
    for each in found:
        hyperparams.override(experiment, each.assignments)
    if index is not None and not 0 <= index < len(found):
        raise UsageError(
            f"Expected --sweep_index from 0 to {len(found) - 1}; received {index}."
        )
    statuses = []
    for number, each in enumerate(found):
        folder = f"{logdir}/{each.name}"
        if index not in (None, number) or (index is None and _is_over(folder)):
            continue
        print(f"\nRun {number} of {len(found)}: {folder}", flush=True)
        settings = [f"--set={assignment}" for assignment in each.assignments]
        command = [*arguments, *settings, f"--logdir={folder}"]
        status = _wait(
            subprocess.Popen([sys.executable, "-m", "tfgpipe_trainer", *command])
        )
        if status in _STOPPED:
            return status
        statuses.append(status)
    if index is not None:
        return statuses[0]
    print(f"\n{table(found, logdir)}", flush=True)
    # A run that diverges is a result.
    return max((each for each in statuses if each != _DIVERGED), default=0)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Waits for a run; a signal that asks for the end is its own."""

    def pass_on(number: int, frame: types.FrameType | None) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # Of a terminal, which has sent it to both.
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def _records(folder: str) -> list[dict[str, Any]]:
    path = files.to_path(folder, name="--logdir") / "metrics.jsonl"
    return list(read_metrics(path))


def _is_over(folder: str) -> bool:
    return any(record.get("final") for record in _records(folder))


def table(found: Sequence[Combination], logdir: str) -> str:
    """Returns a table of the runs of a sweep: the last of all that they measure.

    Args:
        found: The combinations.
        logdir: The folder of the sweep.
    """
    rows = []
    for each in found:
        cells = dict(x.partition("=")[::2] for x in each.assignments)
        measured: dict[str, float] = {}
        for record in _records(f"{logdir}/{each.name}"):
            measured |= {n: x for n, x in record.items() if n != "final"}
        cells["step"] = str(measured.get("step", "none"))
        shown = [n for n in measured if n == "loss" or n.startswith("validation_")]
        rows.append(cells | {name: f"{measured[name]:.4f}" for name in shown})
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([row.get(name, "") for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
