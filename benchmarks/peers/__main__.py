"""Measures what the flags describe: see `benchmarks.peers`."""

from __future__ import annotations

import argparse

from benchmarks import tables
from benchmarks.peers import measure


def main() -> None:
    """Measures what the flags describe and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Measures this library beside others.",
    )
    parser.add_argument(
        "--workload", choices=("mlp", "transformer"), default="transformer"
    )
    parser.add_argument(
        "--microbatches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[8],
        help="values of M, with commas",
    )
    parser.add_argument(
        "--schedules",
        type=lambda text: text.split(","),
        default=["gpipe", "1f1b"],
        help="with commas",
    )
    parser.add_argument("--torch", metavar="PYTHON", help="of an environment with it")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    flags = parser.parse_args()
    rows = []
    for num_microbatches in flags.microbatches:
        rows += measure(
            flags.workload,
            num_microbatches=num_microbatches,
            schedules=flags.schedules,
            torch=flags.torch,
            steps=flags.steps,
        )
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


if __name__ == "__main__":
    main()
