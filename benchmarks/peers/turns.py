"""All sides of a comparison, each training a step when it is its turn.

Every side is up all the time and trains on a core a stage, one where it is plain, while
the others wait: whatever else the machine does hits all of them alike. Ratios are of
neighbouring steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.peers import weights
from benchmarks.peers.environments import PEERS
from benchmarks.peers.protocol import Task
from benchmarks.worker import Remat, Schedule, Side, Step, Worker, busy_seconds

# Of a loss. Float32 rounding, in another order of summation and another library's
# kernels, makes less than a tenth of it; a step of training moves a loss by more.
TOLERANCE = 1e-5
PLAIN = "tfgpipe plain"
REFERENCE = "tfgpipe 1f1b"
# Batch normalization makes the losses of a pipeline, which normalizes each microbatch,
# others than the plain model's: they are compared with the reference's.
NORMALIZES_BATCHES = ("resnet50",)
ROOT = Path(__file__).resolve().parents[2]
# Sizes at which what is compared is arithmetic, and time means nothing.
SMALL: dict[str, dict[str, float]] = {
    "mlp": {"num_layers": 4},
    "transformer": {"num_layers": 4, "batch_size": 16, "length": 16, "d_model": 32},
    "decoder": {"batch_size": 16, "length": 16, "d_model": 32, "vocabulary": 64},
    "resnet50": {"batch_size": 16, "filters": 8, "num_classes": 10},
    "translation": {"batch_size": 16, "length": 16, "d_model": 32, "vocabulary": 64},
}
# Sizes at which time is measured, where they are not the workload's own. Dropout draws
# other masks on each side, so that losses cannot be compared: without it they are.
TIMED: dict[str, dict[str, float]] = {"decoder": {"dropout": 0.1}}


class PeerProcess(contextlib.AbstractContextManager["PeerProcess"]):
    """A peer in a process of its environment.

    Args:
        python: The environment's Python.
        module: What runs the peer, of this package.
        task: What it is to train.
        cores: The cores to run on.

    Attributes:
        versions: Of the packages that matter, by their names.

    Raises:
        RuntimeError: If the process stops by itself.
    """

    def __init__(
        self, python: str, *, module: str, task: Task, cores: Sequence[int]
    ) -> None:
        self._cores = tuple(cores)
        self._name = module
        self._process = subprocess.Popen(
            [
                python,
                "-m",
                f"benchmarks.peers.{module}",
                json.dumps(dataclasses.asdict(task)),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions: dict[str, str] = self._receive()

    def step(self) -> Step:
        """Trains one step."""
        assert self._process.stdin is not None
        busy_start = busy_seconds(self._cores)
        print("step", file=self._process.stdin, flush=True)
        result = self._receive()
        busy = busy_seconds(self._cores) - busy_start
        return Step(**result, stolen_seconds=busy - result["cpu_seconds"])

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} stopped. What it said is above.")
        return json.loads(line)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came out of it.

    Attributes:
        rows: One for each side.
        versions: Of the peers' packages, by their names.
        others: The share of the cores' time that other work took, by `/proc/stat`.
    """

    rows: list[tables.Row]
    versions: dict[str, str]
    others: float


def measure(
    workload: str,
    *,
    num_microbatches: int,
    schedules: Sequence[Schedule],
    pythons: Mapping[str, str],
    steps: int,
    num_stages: int = 2,
    remat: Remat = "none",
    sizes: Mapping[str, float] | None = None,
    warmup: int = 2,
    compiled: bool = False,
) -> Comparison:
    """Trains all sides in turns, each stage on a core of its own, or on a shared one.

    Args:
        workload: A name in `benchmarks.workloads.WORKLOADS`.
        num_microbatches: M.
        schedules: Those to run, of each side that has them.
        pythons: Those of peers' environments, by the peers' names.
        steps: How many steps are timed.
        num_stages: K.
        remat: `"none"` or `"stage"`.
        sizes: Keyword arguments of the workload, or None for those in `TIMED`.
        warmup: How many steps go before these.
        compiled: True for sides that compile more than as installed, as well: plain
            Keras by XLA, torch by `torch.compile`.
    """
    cores = tuple(sorted(os.sched_getaffinity(0))[:num_stages])
    sizes = dict(TIMED.get(workload, {}) if sizes is None else sizes)
    ours: dict[str, Side] = {
        PLAIN: Side(
            workload=workload,
            sizes=sizes,
            executor="serial",
            cores=cores[:1],
        )
    }
    if compiled:
        ours[f"{PLAIN} XLA"] = dataclasses.replace(ours[PLAIN], jit_compile=True)
    for schedule in dict.fromkeys([*schedules, "1f1b"]):
        ours[f"tfgpipe {schedule}"] = Side(
            workload=workload,
            sizes=sizes,
            num_stages=2 * num_stages if schedule == "interleaved" else num_stages,
            num_devices=num_stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            remat=remat,
            executor="serial",
            cores=cores,
        )
    # Sides start several at a time, which nothing measures.
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(cores)) as pool:
        given = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "given.npz"
        weights.dump(given, workload, sizes)
        makers: dict[str, Callable[[], Worker | PeerProcess]] = {
            name: functools.partial(Worker, side) for name, side in ours.items()
        }
        for name, python in pythons.items():
            if workload not in PEERS[name].workloads:
                continue
            orders = [
                (order, by_compiler)
                for order in schedules_of(name, schedules, remat, workload)
                for by_compiler in ((False, True) if compiled else (False,))
                if not by_compiler or compiles(name, order, workload)
            ]
            for order, by_compiler in orders:
                K = 1 if order == "plain" else num_stages
                process = functools.partial(
                    PeerProcess,
                    python,
                    module=PEERS[name].module,
                    task=Task(
                        workload=workload,
                        given=str(given),
                        num_stages=K,
                        num_processes=1 if PEERS[name].one_process else K,
                        num_microbatches=num_microbatches,
                        schedule=order,
                        remat="none" if remat == "none" else "stage",
                        port=_free_port(),
                        compiled=by_compiler,
                    ),
                    cores=cores[:K],
                )
                side_name = f"{name} {order}{' compiled' if by_compiler else ''}"
                makers[side_name] = process
        entered = pool.map(lambda make: stack.enter_context(make()), makers.values())
        sides = dict(zip(makers, entered, strict=True))
        versions: dict[str, str] = {}
        for side in sides.values():
            versions.update(side.versions if isinstance(side, PeerProcess) else {})
        first = pool.map(lambda side: side.step(), sides.values())
        turns = [dict(zip(sides, first, strict=True))]
        turns += [
            {name: side.step() for name, side in sides.items()}
            for _ in range(warmup + steps - 1)
        ]
    head = {
        "workload": workload,
        "K": num_stages,
        "M": num_microbatches,
        "remat": remat,
    }
    rows = summarise(
        turns,
        warmup=warmup,
        pipelines_as=REFERENCE if workload in NORMALIZES_BATCHES else PLAIN,
        compare_losses=not sizes.get("dropout"),
    )
    return Comparison(
        rows=[{**head, **row} for row in rows],
        versions=versions,
        others=_share_of_others(turns[warmup:], len(cores)),
    )


def schedules_of(
    name: str, asked: Sequence[str], remat: str, workload: str
) -> Iterator[str]:
    """Yields the schedules of a peer that are run: plain ones, too, without remat.

    The zero-bubble schedule of torch goes back through a stage twice, for gradients of
    inputs and of weights, and `torch.utils.checkpoint` recomputes it for each. That is
    no way to train, so it is left out. So it is of `translation`, with two tensors
    between stages, where it fails: autograd has freed what the second time needs.

    >>> list(schedules_of("torchgpipe", ["gpipe", "1f1b"], "stage", "mlp"))
    ['gpipe']
    """
    has = PEERS[name].schedules
    if "plain" in has and remat == "none":
        yield "plain"
    for schedule in asked:
        fails = remat == "stage" or workload == "translation"
        if schedule in has and not (schedule == "zero_bubble" and fails):
            yield schedule


def compiles(name: str, order: str, workload: str) -> bool:
    """Returns whether a peer trains what a compiler of its own makes.

    Stages of `resnet50` that `torch.compile` has compiled end with "input tensor has to
    be contiguous", of gradients that gloo is to receive.

    Args:
        name: The peer.
        order: A schedule, or "plain".
        workload: The workload.
    """
    fails = workload == "resnet50" and order != "plain"
    return PEERS[name].can_compile and not fails


def summarise(
    turns: Sequence[Mapping[str, Step]],
    *,
    warmup: int,
    pipelines_as: str = PLAIN,
    compare_losses: bool = True,
) -> list[tables.Row]:
    """Returns a row for each side, without a time where its losses are others.

    Args:
        turns: The step of each side, turn by turn.
        warmup: How many turns at the start are not timed.
        pipelines_as: The side whose losses those of pipelines must be.
        compare_losses: False where each side draws its own dropout.
    """
    rows = []
    for name in turns[0]:
        losses = [turn[name].loss for turn in turns]
        same = PLAIN if "plain" in name else pipelines_as
        expected = [turn[same].loss for turn in turns]
        differ = compare_losses and not all(
            math.isclose(a, b, rel_tol=TOLERANCE)
            for a, b in zip(losses, expected, strict=True)
        )
        timed = turns[warmup:]
        seconds = [turn[name].seconds for turn in timed]
        ratios = [turn[name].seconds / turn[REFERENCE].seconds for turn in timed]
        cpu_seconds = [turn[name].cpu_seconds for turn in timed]
        cores = [turn[name].cpu_seconds / turn[name].seconds for turn in timed]
        figures: tables.Row = {
            "ms": 1e3 * statistics.median(seconds),
            "least": 1e3 * min(seconds),
            "of tfgpipe 1f1b": statistics.median(ratios),
            "CPU ms": 1e3 * statistics.median(cpu_seconds),
            "cores": statistics.median(cores),
        }
        if differ:
            figures = {**dict.fromkeys(figures, ""), "ms": "losses differ"}
        moved = f"{losses[0]:.5f} to {losses[-1]:.5f}"
        if not compare_losses:
            moved += ", not compared"
        rows.append({"side": name, **figures, "loss": moved})
    return rows


def _share_of_others(turns: Sequence[Mapping[str, Step]], num_cores: int) -> float:
    """Returns the part of the cores' time that went to other work, plain sides aside.

    A plain side is looked at on its own core only, and has the other one free.
    """
    some = [
        step for turn in turns for name, step in turn.items() if "plain" not in name
    ]
    stolen = sum(step.stolen_seconds for step in some)
    return max(0.0, stolen / sum(step.seconds for step in some) / num_cores)


def _free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]
