"""On a CPU a step in bfloat16 takes 2.75 times as long, in 158 MiB instead of 231.

Time and memory of a train step in single and half precision, and in 8 bits.

    python -m benchmarks.studies.precision --workload=transformer --microbatches=8

The same layers in a `PipelinedModel` on K cores, one a device: in float32, in
`mixed_bfloat16` with float32 weights, and quantization-aware, which computes in float32
on weights and activations rounded to 8 bits. Each has its own process; they alternate
step by step, on the same data. `step ms` is the median over `--steps` steps
after `--warmup` untimed ones, `of float32` the median of ratios of neighbouring steps;
`step MiB` the peak of resident memory less what was resident before, in a process that
returns freed tensors immediately. (A CPU without instructions for bfloat16 computes it
through float32, and is slower; compare the memory.)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from typing import get_args

from benchmarks import tables
from benchmarks.worker import Precision, Side, Worker

MIB = 2**20


def measure(sides: list[Side], *, steps: int, warmup: int) -> list[tables.Row]:
    """Trains all sides in turns; returns what each took, the first the baseline."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(side)) for side in sides]
        turns = [[w.step().seconds for w in workers] for _ in range(warmup + steps)]
    turns = turns[warmup:]
    rows = []
    for number, side in enumerate(sides):
        with Worker(side, for_memory=True) as worker:
            memory = worker.memory()
        rows.append(
            {
                "workload": side.workload,
                "precision": side.precision,
                "K": side.num_stages,
                "M": side.num_microbatches,
                "remat": side.remat,
                "step ms": 1e3 * statistics.median(turn[number] for turn in turns),
                "of float32": statistics.median(t[number] / t[0] for t in turns),
                "before MiB": memory.before // MIB,
                "step MiB": (memory.peak - memory.before) // MIB,
            }
        )
    return rows


def main() -> None:
    """Measures each precision on one workload."""
    flags = _parse()
    cores = tuple(sorted(os.sched_getaffinity(0))[: flags.stages])
    sides = [
        Side(
            workload=flags.workload,
            num_stages=flags.stages,
            num_microbatches=flags.microbatches,
            schedule="1f1b",
            remat=flags.remat,
            precision=precision,
            executor="serial",
            cores=cores,
        )
        for precision in flags.precisions
    ]
    rows = measure(sides, steps=flags.steps, warmup=flags.warmup)
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures a train step in single and half precision and 8 bits."
    )
    parser.add_argument(
        "--workload", choices=("mlp", "transformer"), default="transformer"
    )
    parser.add_argument("--stages", type=int, default=2, help="K, one core each")
    parser.add_argument("--microbatches", type=int, default=8, help="M")
    parser.add_argument("--remat", choices=("none", "stage"), default="none")
    parser.add_argument(
        "--precisions",
        type=lambda text: text.split(","),
        default=["float32", "mixed_bfloat16", "int8"],
        help=f"of {', '.join(get_args(Precision))}; the first is the baseline",
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
