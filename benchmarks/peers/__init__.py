"""This library beside others on the same workload, step by step in turns.

    python -m benchmarks.peers --torch=PYTHON --workload=transformer --microbatches=4,8

`PYTHON` is that of an environment with torch; make one with

    python -m venv torch-env && torch-env/bin/pip install torch numpy

Each side trains the same layers from the same weights on the same data, in processes of
its own with one core a stage; the losses must agree. `plain` is the framework's own
training step on one core. Columns: milliseconds a step, median and least; the median of
the ratios to this library's 1F1B in neighbouring steps; the loss before the last step.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks import tables
from benchmarks.worker import Schedule, Side, Step, Worker

# Float32 rounding, in another order of summation and another library's kernels.
TOLERANCE = 1e-3
REFERENCE = "tfgpipe 1f1b"


class Trains(Protocol):
    """Something that trains a step when told to."""

    def step(self) -> Step:
        """Trains one step."""
        ...


class Torch(contextlib.AbstractContextManager["Torch"]):
    """`torch_pipelining.py` in a process of another environment.

    Args:
        python: The environment's Python.
        **flags: The script's flags.
    """

    def __init__(self, python: str, **flags: object) -> None:
        script = Path(__file__).with_name("torch_pipelining.py")
        command = [python, str(script), *(f"--{k}={v}" for k, v in flags.items())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self._receive()["torch"]

    def step(self) -> Step:
        """Trains one step."""
        assert self._process.stdin is not None
        print("step", file=self._process.stdin, flush=True)
        result = self._receive()
        return Step(
            seconds=result["seconds"],
            cpu_seconds=float("nan"),
            stolen_seconds=float("nan"),
            loss=result["loss"],
        )

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("The peer stopped. What it said is above.")
        return json.loads(line)


def measure(
    workload: str,
    *,
    num_microbatches: int,
    schedules: Sequence[Schedule],
    torch: str | None,
    steps: int,
    warmup: int = 2,
) -> list[tables.Row]:
    """Trains all sides in turns on two cores, and returns a row for each."""
    cores = tuple(sorted(os.sched_getaffinity(0))[:2])
    sides = {
        "tfgpipe plain": Side(workload=workload, cores=cores[:1], executor="serial")
    }
    for schedule in schedules:
        sides[f"tfgpipe {schedule}"] = Side(
            workload=workload,
            num_stages=4 if schedule == "interleaved" else 2,
            num_devices=2,
            num_microbatches=num_microbatches,
            schedule=schedule,
            executor="serial",
            cores=cores,
        )
    with contextlib.ExitStack() as stack:
        peers: dict[str, Trains] = {
            name: stack.enter_context(Worker(side)) for name, side in sides.items()
        }
        if torch is not None:
            theirs = [("plain", 1), *((name, 2) for name in schedules)]
            for number, (name, stages) in enumerate(theirs):
                peers[f"torch {name}"] = stack.enter_context(
                    Torch(
                        torch,
                        workload=workload,
                        stages=stages,
                        microbatches=num_microbatches,
                        schedule="gpipe" if name == "plain" else name,
                        port=29531 + number,
                    )
                )
        turns = [
            {name: peer.step() for name, peer in peers.items()}
            for _ in range(warmup + steps)
        ]
    rows = []
    for name in turns[0]:
        losses = [turn[name].loss for turn in turns]
        expected = [turn["tfgpipe plain"].loss for turn in turns]
        for a, b in zip(losses, expected, strict=True):
            if abs(a - b) > TOLERANCE * abs(b):
                raise ArithmeticError(
                    f"All must train alike. Received losses {losses} of {name}, and "
                    f"{expected} of tfgpipe plain."
                )
        times = [turn[name].seconds for turn in turns[warmup:]]
        of = [turn[name].seconds / turn[REFERENCE].seconds for turn in turns[warmup:]]
        rows.append(
            {
                "workload": workload,
                "M": num_microbatches,
                "side": name,
                "ms": 1e3 * statistics.median(times),
                "least": 1e3 * min(times),
                "of tfgpipe 1f1b": statistics.median(of),
                "loss": losses[-1],
            }
        )
    return rows
