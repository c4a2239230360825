"""Compiled chains make a large step take 0.86 of its time, and a small one no longer.

Steps with and without compiled chains of elementwise operations, by size.

    python -m benchmarks.studies.fusion

Two pipelines of two transformer blocks on one core, `jit_compile="auto"` and False,
alternate step by step. `numbers` are those of a tensor between layers, of which the
hidden layer of a block has four times as many. The ratio is the median of the ratios of
neighbouring steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Literal

from benchmarks import tables
from benchmarks.worker import Side, Worker

# Rows, positions and width.
SIZES = (
    *((1, 16, 64), (4, 16, 64), (8, 16, 64), (8, 32, 64), (8, 64, 64), (8, 64, 128)),
    *((4, 128, 256), (32, 128, 256)),
)


def measure(size: tuple[int, int, int], *, steps: int) -> tables.Row:
    """Returns the row of a size."""
    rows, length, width = size
    core = sorted(os.sched_getaffinity(0))[0]

    def side(jit_compile: Literal["auto", False]) -> Side:
        return Side(
            workload="transformer",
            sizes={
                "num_layers": 2,
                "batch_size": rows,
                "length": length,
                "d_model": width,
            },
            num_stages=1,
            schedule="gpipe",
            jit_compile=jit_compile,
            cores=(core,),
        )

    with Worker(side(False)) as plain, Worker(side("auto")) as fused:
        first = [worker.step().seconds for worker in (plain, fused)]
        pairs = [(plain.step().seconds, fused.step().seconds) for _ in range(steps)]
    return {
        "numbers": rows * length * width,
        "off ms": 1e3 * statistics.median(a for a, _ in pairs),
        "auto ms": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
        "first step off s": first[0],
        "first step auto s": first[1],
    }


def main() -> None:
    """Prints a row for each size."""
    parser = argparse.ArgumentParser(description="Measures compiled chains.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    flags = parser.parse_args()
    rows = [measure(size, steps=flags.steps) for size in SIZES]
    print(tables.draw_markdown(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


if __name__ == "__main__":
    main()
