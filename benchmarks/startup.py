"""Size of the train step's graph, and seconds until the first step is done.

    python -m benchmarks.startup --blocks=48 --stages=8 --microbatches=32

A stage is traced once and its functions are called M times, so nodes grow with the
number of actions, M x K, and with the layers, but not with M x layers. The rows before
the last, which is what the flags ask for, vary one of them at a time to show it.

Blocks are those of the transformer workload, narrow and on short sequences, so that
start-up is measured rather than arithmetic. Columns: seconds to build the model, to
trace and run the first step, and to run one more; nodes of the train step's own graph,
and number and nodes of the functions in its library.
"""

from __future__ import annotations

import argparse
import os

from benchmarks import tables
from benchmarks.worker import Remat, Side, Worker


def measure(
    *, num_blocks: int, num_stages: int, num_microbatches: int, remat: Remat
) -> tables.Row:
    """Starts one pipelined model in a process of its own and returns what it took."""
    side = Side(
        workload="transformer",
        # Every microbatch has an example.
        sizes={
            "num_layers": num_blocks,
            "batch_size": num_microbatches,
            "length": 16,
            "d_model": 64,
        },
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule="1f1b",
        remat=remat,
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )
    with Worker(side) as worker:
        first, second = worker.step(), worker.step()
        graph = worker.graph()
    return {
        "blocks": num_blocks,
        "K": num_stages,
        "M": num_microbatches,
        "M x K": num_microbatches * num_stages,
        "build s": worker.build_seconds,
        "first step s": first.seconds,
        "next step s": second.seconds,
        "nodes": graph.num_nodes,
        "functions": graph.num_functions,
        "function nodes": graph.num_function_nodes,
    }


def main() -> None:
    """Measures a few small pipelines and the one that the flags describe."""
    flags = _parse()
    cases = [(8, 2, 4), (16, 2, 4), (8, 4, 4), (8, 2, 8), (8, 2, 16)]
    cases.append((flags.blocks, flags.stages, flags.microbatches))
    rows = [
        measure(
            num_blocks=num_blocks,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            remat=flags.remat,
        )
        for num_blocks, num_stages, num_microbatches in cases
    ]
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures how long a pipeline takes to start, and its graph."
    )
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--stages", type=int, default=8, help="K")
    parser.add_argument("--microbatches", type=int, default=32, help="M")
    parser.add_argument("--remat", default="stage")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
