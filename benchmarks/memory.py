"""Resident memory of a train step in each way of rematerialisation.

    python -m benchmarks.memory --blocks=32 --stages=2 --microbatches=8

The transformer workload, deeper. Every row is a process of its own, which traces the
train step and then runs it once: `step MiB` is the most that was resident meanwhile,
less what was before (weights, data, TensorFlow itself: `before MiB`). All stages are in
one process here, so this is the sum over devices. The first row is the plain
`keras.Sequential`. Linux only.
"""

from __future__ import annotations

import argparse
import os
from typing import get_args

from benchmarks import tables
from benchmarks.worker import Remat, Side, Worker

MIB = 2**20


def measure(side: Side) -> tables.Row:
    """Trains in a process of its own and returns the memory it took."""
    with Worker(side) as worker:
        memory = worker.memory()
    pipelined = side.num_stages is not None
    return {
        "remat": side.remat if pipelined else "plain Sequential",
        "K": side.num_stages or 1,
        "M": side.num_microbatches,
        "before MiB": memory.before // MIB,
        "step MiB": (memory.peak - memory.before) // MIB,
    }


def main() -> None:
    """Measures the plain model, then each way of rematerialisation."""
    flags = _parse()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    sizes = {"num_layers": flags.blocks}
    sides = [Side(workload="transformer", sizes=sizes, cores=cores)]
    sides += [
        Side(
            workload="transformer",
            sizes=sizes,
            num_stages=flags.stages,
            num_microbatches=flags.microbatches,
            remat=remat,
            cores=cores,
        )
        for remat in get_args(Remat)
    ]
    rows = [measure(side) for side in sides]
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures the memory of a train step, by rematerialisation."
    )
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--stages", type=int, default=2, help="K")
    parser.add_argument("--microbatches", type=int, default=8, help="M")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
