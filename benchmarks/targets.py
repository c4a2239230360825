"""Measured speed, start-up and memory, compared with targets.

    python -m benchmarks.targets [--torch=PYTHON] [--note=TEXT]
    python -m benchmarks.targets --table

All on two cores, one per device, in processes that alternate step by step; speed-ups
are relative to the plain Keras model on one core. `--note` adds a row to `history.csv`,
with machine and versions; `--table` measures nothing, and writes the last two rows into
`RESULTS.md`. `--torch` is the Python of an environment with torch, which
`benchmarks.peers.environments` creates; without it the last rows are omitted.

`two at once` is no target but a property of the machine: how much slower a core is
while another process is busy on the other. No pipeline can regain that.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from benchmarks import pipeline, startup, tables
from benchmarks.peers import report, turns
from benchmarks.peers.environments import PEERS
from benchmarks.worker import Remat, Schedule, Side, Worker

# Those that are compared with torch's.
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "zero_bubble")
HISTORY = Path(__file__).with_name("history.csv")
RESULTS = Path(__file__).with_name("RESULTS.md")
# Around the table in `RESULTS.md`.
BEGIN, END = "<!-- benchmarks.targets --table -->\n", "<!-- end -->\n"
_PLAIN, _BOUND = "of the plain step", "speed-up, of its bound"
_START = "seconds to the first step, 48 blocks, K=8, M=32"
_START_LARGE = "seconds to the first step, 48 blocks, K=8, M=256"
# What is measured, in the order of the table, and the bound to reach, if there is one.
TARGETS: dict[str, tuple[Literal["most", "least"], float] | None] = {
    "two at once": None,
    f"mlp, K=1, M=1: {_PLAIN}": ("most", 1.02),
    f"mlp, K=2, M=4: {_BOUND}": ("least", 0.85),
    f"mlp, K=2, M=8: {_BOUND}": ("least", 0.85),
    f"mlp, K=2, M=8, remat: {_BOUND}": ("least", 0.95),
    f"transformer, K=1, M=1: {_PLAIN}": ("most", 1.02),
    f"transformer, K=1, M=8: {_PLAIN}": ("most", 1.10),
    f"transformer, K=2, M=4: {_BOUND}": ("least", 0.95),
    f"transformer, K=2, M=8: {_BOUND}": ("least", 0.95),
    f"transformer, K=2, M=16: {_BOUND}": ("least", 0.95),
    f"transformer, K=2, M=8, remat: {_BOUND}": ("least", 0.95),
    "microseconds an action": ("most", 300),
    _START: ("most", 12),
    f"{_START}: plain Keras": None,
    f"{_START}: as a layer, of that": ("most", 1.3),
    _START_LARGE: ("most", 60),
    "step memory, of the formula": ("most", 1.10),
    **{
        f"{workload}, M=8: {kind}, of torch's best": ("most", 1.0)
        for workload in PEERS["torch"].workloads
        for kind in ("plain", "pipeline")
    },
}


def verdict(name: str, value: float) -> str:
    """Returns whether a figure reaches its target, nothing if there is none."""
    match TARGETS[name]:
        case ("least", wanted):
            return "pass" if value >= wanted else "short"
        case ("most", wanted):
            return "pass" if value <= wanted else "short"
    return ""


def measure(torch: str | None, steps: int) -> Iterator[tuple[str, float]]:
    """Measures all targets, one after the other."""
    cores = tuple(sorted(os.sched_getaffinity(0))[:2])
    yield "two at once", _two_at_once(cores, steps)
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

            yield f"{workload}, K=1, M=1: {_PLAIN}", 1 / row(1, 1)["paired"]
            if workload == "transformer":
                yield f"{workload}, K=1, M=8: {_PLAIN}", 1 / row(1, 8)["paired"]
            for M in (4, 8) if workload == "mlp" else (4, 8, 16):
                found = row(2, M)
                name = f"{workload}, K=2, M={M}: {_BOUND}"
                yield name, found["paired"] / found["bound"]
            found = row(2, 8, "stage")
            name = f"{workload}, K=2, M=8, remat: {_BOUND}"
            yield name, found["paired"] / found["bound"]
    yield "microseconds an action", _seconds_an_action(cores) * 1e6
    seconds = _start_seconds("1f1b")
    yield _START, seconds
    yield f"{_START}: plain Keras", _start_seconds(None, num_stages=None)
    yield f"{_START}: as a layer, of that", _start_seconds(None) / seconds
    yield _START_LARGE, _start_seconds("1f1b", num_microbatches=256)
    yield "step memory, of the formula", _memory(cores)
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
            yield f"{workload}, M=8: {kind}, of torch's best", ours / theirs


def _start_seconds(
    schedule: Schedule | None,
    *,
    num_stages: int | None = 8,
    num_microbatches: int = 32,
) -> float:
    """Returns the seconds from creating 48 blocks to the end of the first step."""
    found = startup.measure(
        num_blocks=48,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        remat="stage",
        schedule=schedule,
    )
    return found["build s"] + found["first step s"]


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


def history() -> list[dict[str, str]]:
    """Returns all runs that were noted, the latest last."""
    with HISTORY.open(newline="") as file:
        return list(csv.DictReader(file))


def note(figures: Mapping[str, float], text: str) -> None:
    """Adds a row with all figures to the history."""
    row = {
        "date": datetime.date.today().isoformat(),
        "commit": report.commit(),
        "note": text,
        "machine": report.machine(),
        **report.our_versions(),
        **{name: f"{value:.4g}" for name, value in figures.items()},
    }
    rows = history()
    names = dict.fromkeys(name for some in (*rows, row) for name in some)
    with HISTORY.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, row])


def draw(figures: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Returns a table of a run beside another, in Markdown."""
    rows = []
    for name, target in TARGETS.items():
        if value := figures.get(name):
            rows.append(
                {
                    "target": name,
                    "measured": f"{float(value):.3g}",
                    "wanted": f"at {target[0]} {target[1]:g}" if target else "",
                    "": verdict(name, float(value)),
                    "before": f"{float(b):.3g}" if (b := before.get(name)) else "",
                }
            )
    return tables.draw_markdown(rows)


def section() -> str:
    """Returns what `RESULTS.md` has of the last two runs of the history."""
    before, last = history()[-2:]
    text = (
        f"{last['date']}, commit {last['commit']}, {last['machine']}; before: "
        f"{before['date']}, commit {before['commit']}, {before['machine']}."
    )
    return f"{text}\n\n{draw(last, before)}\n"


def main() -> None:
    """Measures all targets and prints a table, or writes that of the history."""
    parser = argparse.ArgumentParser(description="Measures against the targets.")
    parser.add_argument("--torch", metavar="PYTHON", help="of an environment with it")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--note", metavar="TEXT", help="add a row to history.csv")
    parser.add_argument(
        "--table", action="store_true", help="write the last rows into RESULTS.md"
    )
    flags = parser.parse_args()
    if flags.table:
        text = RESULTS.read_text("utf-8")
        begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        RESULTS.write_text(f"{text[:begin]}\n{section()}\n{text[end:]}", "utf-8")
        return
    figures: dict[str, float] = {}
    for name, value in measure(flags.torch, flags.steps):
        print(f"{name}: {value:.3g} {verdict(name, value)}", flush=True)
        figures[name] = value
    print(draw({name: str(value) for name, value in figures.items()}, {}))
    if flags.note is not None:
        note(figures, flags.note)


if __name__ == "__main__":
    main()
