"""Resident memory of a train step by schedule and rematerialisation, and its formula.

    python -m benchmarks.memory --blocks=32 --devices=4 --microbatches=32
    python -m benchmarks.memory --workload=resnet50 --devices=2 --microbatches=8

The transformer workload, deeper, or another. Every row is measured in its own process,
which traces the train step and then runs it once: `step MiB` is the peak of resident
memory less what was resident before (weights, data, TensorFlow itself: `before MiB`).
`formula` adds up gradients, one buffer per weight, and activations of the microbatches
in flight, by `tfgpipe.simulate`. All stages are in one process here, so both are sums
over devices. `of first` compares with the first schedule of the same `remat`. The first
row is the plain `keras.Sequential`. Linux only.
"""

from __future__ import annotations

import argparse
import os
from typing import get_args

from benchmarks import tables
from benchmarks.worker import Remat, Schedule, Side, Worker

MIB = 2**20
WORKLOADS = ("transformer", "decoder", "translation", "resnet50", "mlp")


def measure(side: Side) -> tables.Row:
    """Trains in a process of its own and returns the memory it took."""
    with Worker(side, for_memory=True) as worker:
        memory = worker.memory()
        expected = None if side.schedule is None else worker.expected_memory()
    return {
        "schedule": side.schedule or "plain Sequential",
        "remat": side.remat if side.schedule else "-",
        "K": side.num_stages or 1,
        "M": side.num_microbatches,
        "before MiB": memory.before // MIB,
        "step MiB": (memory.peak - memory.before) // MIB,
        "formula": "-" if expected is None else expected // MIB,
    }


def main() -> None:
    """Measures the plain model, then each schedule in each way of rematerialisation."""
    flags = _parse()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    workload = flags.workload
    sizes = {"num_layers": flags.blocks} if workload == "transformer" else {}
    rows = [measure(Side(workload=workload, sizes=sizes, cores=cores))]
    for remat in flags.remat:
        base = 0
        for schedule in flags.schedules:
            row = measure(
                Side(
                    workload=workload,
                    sizes=sizes,
                    num_stages=flags.devices * (2 if schedule == "interleaved" else 1),
                    num_devices=flags.devices,
                    num_microbatches=flags.microbatches,
                    schedule=schedule,
                    remat=remat,
                    cores=cores,
                )
            )
            base = base or row["step MiB"]
            rows.append({**row, "of first": row["step MiB"] / base})
            print(tables.draw(rows[-1:]), flush=True)
    rows[0]["of first"] = "-"
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


def _parse() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description="Measures the memory of a train step.")
    parser.add_argument("--workload", choices=WORKLOADS, default="transformer")
    parser.add_argument("--blocks", type=int, default=32, help="of the transformer")
    parser.add_argument("--devices", type=int, default=4, help="P")
    parser.add_argument("--microbatches", type=int, default=32, help="M")
    parser.add_argument(
        "--schedules", type=names, default=list(get_args(Schedule)), help="with commas"
    )
    parser.add_argument(
        "--remat", type=names, default=list(get_args(Remat)), help="with commas"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
