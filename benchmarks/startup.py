"""Size of the train step's graph, and seconds until the first step is done.

    python -m benchmarks.startup --blocks=48 --stages=8 --microbatches=32

A stage is traced once and its functions are called M times, so nodes grow with the
number of actions, M x K, and with the layers, but not with M x layers. The first rows
vary one of them at a time to show it. The others are what the flags ask for: as a plain
Keras model, as a `PipelinedModel`, as a `PipelinedLayer`, and with 8 M.

Blocks are those of the transformer workload, narrow and on short sequences, so that
start-up is measured rather than arithmetic. Columns: seconds to build the model, to
trace and run the first step, and to run one more; milliseconds of that for each of its
2 M K actions; nodes of the train step's own graph; number and nodes of the functions in
its library.
"""

from __future__ import annotations

import argparse
import os

from benchmarks import tables
from benchmarks.worker import Remat, Schedule, Side, Worker


def measure(
    *,
    num_blocks: int,
    num_stages: int | None,
    num_microbatches: int,
    remat: Remat,
    schedule: Schedule | None = "1f1b",
) -> tables.Row:
    """Starts one model in a process of its own and returns what it took.

    Args:
        num_blocks: The number of transformer blocks.
        num_stages: K, or None for the plain Keras model.
        num_microbatches: M.
        remat: What the pipeline rematerialises.
        schedule: Of a `PipelinedModel`, or None for a `PipelinedLayer`.
    """
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
        schedule=schedule,
        remat=remat,
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )
    with Worker(side) as worker:
        first, second = worker.step(), worker.step()
        graph = worker.graph()
    num_actions = 2 * num_microbatches * (num_stages or 0)
    model = "plain" if num_stages is None else "model" if schedule else "layer"
    return {
        "": model,
        "blocks": num_blocks,
        "K": num_stages or "",
        "M": num_microbatches,
        "build s": worker.build_seconds,
        "first step s": first.seconds,
        "next step s": second.seconds,
        "ms an action": 1e3 * second.seconds / num_actions if num_actions else "",
        "nodes": graph.num_nodes,
        "functions": graph.num_functions,
        "function nodes": graph.num_function_nodes,
    }


def main() -> None:
    """Measures a few small pipelines, and what the flags describe."""
    flags = _parse()
    K, M = flags.stages, flags.microbatches
    cases: list[tuple[int, int | None, int, Schedule | None]] = [
        (8, 2, 4, "1f1b"),
        (16, 2, 4, "1f1b"),
        (8, 4, 4, "1f1b"),
        (8, 2, 8, "1f1b"),
        (8, 2, 16, "1f1b"),
        (flags.blocks, None, M, None),
        (flags.blocks, K, M, "1f1b"),
        (flags.blocks, K, M, None),
        (flags.blocks, K, 8 * M, "1f1b"),
    ]
    rows = [
        measure(
            num_blocks=num_blocks,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            remat=flags.remat,
            schedule=schedule,
        )
        for num_blocks, num_stages, num_microbatches, schedule in cases
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
