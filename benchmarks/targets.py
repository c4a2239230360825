"""Measured speed, start-up and memory, compared with targets.

    python -m benchmarks.targets [--torch=PYTHON] [--note=TEXT]

All on two cores, one per device, in processes that alternate step by step; speed-ups
are relative to the plain Keras model on one core. `--note` adds a row to `history.csv`,
with machine and versions. `--torch` is the Python of an environment with torch, which
`benchmarks.peers.environments` creates; without it the last rows are omitted.

`two at once` is no target but a property of the machine: how much slower a core is
while another process is busy on the other. No pipeline can regain that.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from benchmarks import pipeline, startup, tables
from benchmarks.peers import turns
from benchmarks.peers.environments import PEERS
from benchmarks.worker import Remat, Schedule, Side, Worker

# Those that are compared with torch's.
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "zero_bubble")
HISTORY = Path(__file__).with_name("history.csv")


@dataclasses.dataclass(frozen=True)
class Target:
    """One figure and its target.

    Attributes:
        name: What is measured.
        value: What was measured.
        wanted: The target, or None if there is none.
        at: Whether the target is an upper or a lower bound.
    """

    name: str
    value: float
    wanted: float | None = None
    at: Literal["most", "least"] = "least"

    @property
    def verdict(self) -> str:
        """Whether the target is reached."""
        if self.wanted is None:
            return ""
        reached = (
            self.value >= self.wanted
            if self.at == "least"
            else self.value <= self.wanted
        )
        return "pass" if reached else "short"


def measure(torch: str | None, steps: int) -> Iterator[Target]:
    """Measures all targets, one after the other."""
    cores = tuple(sorted(os.sched_getaffinity(0))[:2])
    yield Target("two at once", _two_at_once(cores, steps))
    for workload in ("mlp", "transformer"):
        plain_side = Side(workload=workload, executor="serial", cores=cores[:1])
        with Worker(plain_side) as plain:

            def row(
                K: int,
                M: int,
                remat: Remat = "none",
                workload: str = workload,
                plain: Worker = plain,
            ) -> tables.Row:
                side = Side(
                    workload=workload,
                    num_stages=K,
                    num_microbatches=M,
                    schedule="1f1b" if M >= K else "gpipe",
                    remat=remat,
                    executor="serial",
                    cores=cores[:K],
                )
                with Worker(side) as pipelined:
                    return pipeline.compare(plain, pipelined, steps=steps, warmup=2)

            name = f"{workload}, K=1, M=1: of the plain step"
            yield Target(name, 1 / row(1, 1)["paired"], 1.02, "most")
            if workload == "transformer":
                name = f"{workload}, K=1, M=8: of the plain step"
                yield Target(name, 1 / row(1, 8)["paired"], 1.10, "most")
            wanted = 0.85 if workload == "mlp" else 0.95
            for M in (4, 8) if workload == "mlp" else (4, 8, 16):
                found = row(2, M)
                name = f"{workload}, K=2, M={M}: speed-up, of its bound"
                yield Target(name, found["paired"] / found["bound"], wanted)
            found = row(2, 8, "stage")
            name = f"{workload}, K=2, M=8, remat: speed-up, of its bound"
            yield Target(name, found["paired"] / found["bound"], 0.95)
    yield Target("microseconds an action", _seconds_an_action(cores) * 1e6, 300, "most")
    found = startup.measure(
        num_blocks=48, num_stages=8, num_microbatches=32, remat="stage"
    )
    seconds = found["build s"] + found["first step s"]
    yield Target("seconds to the first step, 48 blocks, K=8, M=32", seconds, 20, "most")
    yield Target("step memory, of the formula", _memory(cores), 1.10, "most")
    if torch is None:
        return
    for workload in PEERS["torch"].workloads:
        comparison = turns.measure(
            workload,
            num_microbatches=8,
            schedules=SCHEDULES,
            pythons={"torch": torch},
            steps=steps,
        )
        ms = {row["side"]: row["ms"] for row in comparison.rows}
        for kind, some in {"plain": ("plain",), "pipeline": SCHEDULES}.items():
            ours, theirs = (
                min(ms[side] for name in some if (side := f"{library} {name}") in ms)
                for library in ("tfgpipe", "torch")
            )
            name = f"{workload}, M=8: {kind}, of torch's best"
            yield Target(name, ours / theirs, 1.0, "most")


def _two_at_once(cores: tuple[int, ...], steps: int) -> float:
    """Returns how much longer a step takes while the other core is as busy."""
    sides = [Side(workload="transformer", executor="serial", cores=(c,)) for c in cores]
    with Worker(sides[0]) as one, Worker(sides[1]) as other:
        for worker in (one, other):
            worker.step()
        ratios = []
        for _ in range(steps):
            alone = one.step().seconds
            other.begin()
            ratios.append(one.step().seconds / alone)
            other.end()
    return statistics.median(ratios)


def _two_stages(workload: str, num_microbatches: int, cores: tuple[int, ...]) -> Side:
    """Returns a pipeline in TensorFlow's default executor."""
    return Side(
        workload=workload,
        num_stages=2,
        num_microbatches=num_microbatches,
        schedule="1f1b",
        cores=cores,
    )


def _seconds_an_action(cores: tuple[int, ...]) -> float:
    """Returns the seconds of an action with next to no arithmetic."""
    with Worker(_two_stages("actions", 64, cores)) as worker:
        seconds = [worker.step().seconds for _ in range(30)][10:]
    return statistics.median(seconds) / (2 * 2 * 64)


def _memory(cores: tuple[int, ...]) -> float:
    """Returns the measured memory of a step relative to the formula."""
    with Worker(_two_stages("transformer", 8, cores), for_memory=True) as worker:
        memory = worker.memory()
        return (memory.peak - memory.before) / worker.expected_memory()


def note(targets: list[Target], text: str) -> None:
    """Adds a row with all figures to the history."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    row = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "note": text,
        "machine": f"{processor}, {os.cpu_count()} cores",
        **{p: importlib.metadata.version(p) for p in ("tensorflow", "keras")},
        **{target.name: f"{target.value:.4g}" for target in targets},
    }
    rows: list[dict[str, str]] = []
    if HISTORY.exists():
        with HISTORY.open(newline="") as file:
            rows = list(csv.DictReader(file))
    names = dict.fromkeys(name for some in (*rows, row) for name in some)
    with HISTORY.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, row])


def main() -> None:
    """Measures all targets and prints a table."""
    parser = argparse.ArgumentParser(description="Measures against the targets.")
    parser.add_argument("--torch", metavar="PYTHON", help="of an environment with it")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--note", metavar="TEXT", help="add a row to history.csv")
    flags = parser.parse_args()
    targets = []
    for target in measure(flags.torch, flags.steps):
        print(f"{target.name}: {target.value:.3g} {target.verdict}", flush=True)
        targets.append(target)
    rows = [
        {
            "target": target.name,
            "measured": target.value,
            "wanted": ""
            if target.wanted is None
            else f"at {target.at} {target.wanted:g}",
            "": target.verdict,
        }
        for target in targets
    ]
    print(tables.draw(rows))
    if flags.note is not None:
        note(targets, flags.note)


if __name__ == "__main__":
    main()
