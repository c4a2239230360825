"""Schedules side by side: step time, what simulation predicts, and memory.

    python -m benchmarks.schedules --workload=transformer --microbatches=4,8,16

Each schedule trains the workload as a `PipelinedModel` in its own process, one core per
device, without rematerialisation unless `--remat` says otherwise; interleaved has two
stages per device. The processes alternate step by step. Then each times the actions of
some steps; their means per stage are the costs of `tfgpipe.simulate`, whose predicted
step time is compared with the measured one. Memory is that of a first step, in another
process.

Columns: milliseconds a step, median and least; `of gpipe`, the median of the ratios to
GPipe's neighbouring step; `actions`, from the start of the first action to the end of
the last in the steps that were timed; `predicted`, the simulation's step time, and how
much of the measured one it is (the rest is the optimizer and Python); the bubble
measured and predicted; `step MiB`, the peak of resident memory less what was resident
before, over all devices. `--pictures=DIR` draws each timeline.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from benchmarks import tables
from benchmarks.worker import Remat, Schedule, Side, Worker
from tfgpipe.report import plot_timelines
from tfgpipe.simulation import Timeline, average_timelines, costs_of, simulate

MIB = 2**20
SCHEDULES = get_args(Schedule)


def measure(
    sides: dict[str, Side], *, steps: int, warmup: int, pictures: Path | None
) -> list[tables.Row]:
    """Trains all sides in turns and returns a row for each."""
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(side)) for name, side in sides.items()
        }
        turns = [
            {name: worker.step() for name, worker in workers.items()}
            for _ in range(warmup + steps)
        ]
        losses = {turn[name].loss for turn in turns[:1] for name in sides}
        if max(losses) - min(losses) > 1e-4 * max(losses):
            raise ArithmeticError(f"Schedules must agree. Received losses {losses}.")
        found = _timelines(workers)
    rows = []
    for name, side in sides.items():
        timed = turns[warmup:]
        seconds = [turn[name].seconds for turn in timed]
        theory, measured = found[name]
        with Worker(side, for_memory=True) as worker:
            memory = worker.memory()
        rows.append(
            {
                "workload": side.workload,
                "schedule": name,
                "K": side.num_stages,
                "M": side.num_microbatches,
                "ms": 1e3 * statistics.median(seconds),
                "least": 1e3 * min(seconds),
                "of gpipe": statistics.median(
                    turn[name].seconds / turn["gpipe"].seconds for turn in timed
                ),
                "actions": 1e3 * measured.step_time,
                "predicted": 1e3 * theory.step_time,
                "of ms": theory.step_time / statistics.median(seconds),
                "of actions": theory.step_time / measured.step_time,
                "bubble": measured.bubble,
                "in theory": theory.bubble,
                "step MiB": (memory.peak - memory.before) // MIB,
                "stolen": statistics.mean(
                    turn[name].stolen_seconds / turn[name].seconds for turn in timed
                ),
            }
        )
        if pictures is not None:
            title = f"{side.workload}, {name}, M={side.num_microbatches}"
            plot_timelines(
                [
                    dataclasses.replace(theory, title=f"{title}: simulated"),
                    dataclasses.replace(measured, title=f"{title}: measured"),
                ],
                path=pictures / f"{side.workload}-{name}-{side.num_microbatches}.png",
            )
    return rows


def timelines(sides: dict[str, Side]) -> dict[str, tuple[Timeline, Timeline]]:
    """Returns a step of each, simulated and measured."""
    with contextlib.ExitStack() as stack:
        return _timelines(
            {name: stack.enter_context(Worker(side)) for name, side in sides.items()}
        )


def _timelines(workers: dict[str, Worker]) -> dict[str, tuple[Timeline, Timeline]]:
    found = {}
    for name, worker in workers.items():
        worker.timeline()  # Traces, and takes memory that later ones find.
        measured = average_timelines([worker.timeline() for _ in range(5)])
        theory = simulate(measured.schedule, costs_of(measured)).timeline
        found[name] = theory, measured
    return found


def make_sides(
    workload: Literal["mlp", "transformer"],
    *,
    cores: Sequence[int],
    num_microbatches: int,
    remat: Remat = "none",
) -> dict[str, Side]:
    """Returns a side for each schedule, with as many devices as there are cores."""
    P = len(cores)
    return {
        name: Side(
            workload=workload,
            num_stages=P * (2 if name == "interleaved" else 1),
            num_devices=P,
            num_microbatches=num_microbatches,
            schedule=name,
            remat=remat,
            executor="serial",
            cores=tuple(cores),
        )
        for name in SCHEDULES
    }


def main() -> None:
    """Measures every schedule with each number of microbatches."""
    flags = _parse()
    cores = sorted(os.sched_getaffinity(0))[: flags.devices]
    if len(cores) < flags.devices:
        raise SystemExit(
            f"{flags.devices} devices of one core each need as many cores. Received "
            f"{len(cores)}. Use --devices={len(cores)}."
        )
    if flags.pictures:
        flags.pictures.mkdir(parents=True, exist_ok=True)
    rows = []
    for num_microbatches in flags.microbatches:
        sides = make_sides(
            flags.workload,
            cores=cores,
            num_microbatches=num_microbatches,
            remat=flags.remat,
        )
        measured = measure(
            sides, steps=flags.steps, warmup=flags.warmup, pictures=flags.pictures
        )
        print(tables.draw(measured), flush=True)
        rows += measured
    if flags.json:
        tables.write_json(flags.json, rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures schedules side by side.")
    parser.add_argument(
        "--workload", choices=("mlp", "transformer"), default="transformer"
    )
    parser.add_argument("--devices", type=int, default=2, help="P, one core each")
    parser.add_argument(
        "--microbatches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[4, 8, 16],
        help="values of M, with commas",
    )
    parser.add_argument("--remat", choices=get_args(Remat), default="none")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps first")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw timelines")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
