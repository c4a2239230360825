"""By measured time the slowest stage is within 1% of that of the best partition.

How good the partition of each `balance` is, compared with the best of all.

    python -m benchmarks.studies.partition --stages=4
    python -m benchmarks.studies.partition --calls=4000  # how long, and in what memory

For each model the time of every layer, forward, recomputation and backward of one
microbatch, is measured several times; the least is the reference. All partitions are
then tried with it, exhaustively, for the one whose slowest stage is fastest. Each
`balance` partitions the model independently, `"time"` by its own measurement. Columns:

* `plan s`: seconds to plan, including the tracing of layers;
* `share`: the slowest stage's share of the time of all, by the reference;
* `of best`: that share over the share of the best partition (1.00 is optimal);
* `run`: the share when stages are measured instead of layers.

With `--calls` a Functional model of so many calls of operations, in blocks of nine
beside one another and their mean, is partitioned by parameters and built as a
`PipelinedLayer`.
"""

from __future__ import annotations

import argparse
import itertools
import time
import tracemalloc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

import tfgpipe
from benchmarks import tables

if TYPE_CHECKING:
    from tfgpipe.partition import Plan


def main() -> None:
    """Measures the models that the flags name."""
    flags = _parse()
    tfgpipe.make_logical_cpus(flags.stages)
    if flags.calls:
        print(tables.draw([measure_growth(flags.calls, flags.stages)]))
        return
    from benchmarks.studies.models import MODELS  # TensorFlow starts with these.

    rows: list[tables.Row] = []
    for name in flags.models or MODELS:
        rows += measure(name, num_stages=flags.stages, passes=flags.passes)
        print(tables.draw(rows), flush=True)
    if flags.json:
        tables.write_json(flags.json, rows)


def measure_growth(num_calls: int, num_stages: int) -> tables.Row:
    """Returns seconds and memory to plan a model of many calls, and to build it."""
    import keras

    from tfgpipe.capture import source_model
    from tfgpipe.partition import PipelineConfig, balances, plan_by_weights

    x = y = keras.Input((8,))
    for _ in range(num_calls // 10):
        y = keras.layers.Average()([keras.ops.add(y, float(i)) for i in range(9)])
    model = keras.Model(x, y)
    source = source_model.make_source(model)
    with keras.StatelessScope(initialize_variables=False):
        captured = source.capture(source.inputs, {})
    params = balances.find("params")
    config = PipelineConfig(num_stages=num_stages, num_microbatches=4)
    settings = config.plan_settings(tfgpipe.schedules.gpipe(num_stages, 4), 0)
    start = time.perf_counter()
    plan_by_weights(captured, params, settings)
    planned = time.perf_counter()
    tracemalloc.start()
    plan_by_weights(captured, params, settings)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    begun = time.perf_counter()
    layer = tfgpipe.PipelinedLayer(model, num_stages=num_stages, num_microbatches=4)
    layer.build((None, 8))
    return {
        "calls": len(captured.graph.calls),
        "plan s": planned - start,
        "plan MiB": peak / 2**20,
        "build s": time.perf_counter() - begun,
    }


def measure(name: str, *, num_stages: int, passes: int) -> list[tables.Row]:
    """Returns a row for each balance, and one for the best partition."""
    from benchmarks.studies.models import MODELS
    from tfgpipe.partition import balances

    model = MODELS[name]()
    plans, seconds = {}, {}
    for balance in balances.NAMES:
        start = time.perf_counter()
        plans[balance] = tfgpipe.plan(
            model, num_stages=num_stages, num_microbatches=4, balance=balance
        )
        seconds[balance] = time.perf_counter() - start
    again = [
        tfgpipe.plan(
            model, num_stages=num_stages, num_microbatches=4, balance="time"
        ).profile
        for _ in range(passes)
    ]
    settings = plans["time"].settings
    reference = np.min([balances.time.call_costs(p, settings) for p in again], axis=0)
    best = exhaustive_partition(reference, num_stages)
    least = share(reference, best)
    rows: list[tables.Row] = []
    for balance, plan in plans.items():
        mine = share(reference, plan.calls_per_stage)
        rows.append(
            {
                "model": name,
                "balance": balance,
                "calls": " ".join(map(str, plan.calls_per_stage)),
                "plan s": seconds[balance],
                "share": mine,
                "of best": mine / least,
                "run": _run_share(model, plan),
            }
        )
    best_row: tables.Row = {
        "model": name,
        "balance": "exhaustive",
        "calls": " ".join(map(str, best)),
        "plan s": "",
        "share": least,
        "of best": 1.0,
        "run": "",
    }
    return [*rows, best_row]


def exhaustive_partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Returns the partition with the least bottleneck, having tried all."""
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    choices = itertools.combinations(range(1, len(costs)), num_stages - 1)
    ends = np.fromiter(itertools.chain.from_iterable(choices), np.int64)
    inner = ends.reshape(-1, num_stages - 1)
    bounds = np.pad(inner, ((0, 0), (1, 1)), constant_values=(0, len(costs)))
    stages = np.diff(sums[bounds], axis=1)  # [partition, stage]
    best = bounds[stages.max(axis=1).argmin()]
    return tuple(int(n) for n in np.diff(best))


def share(costs: Sequence[float], counts: Sequence[int]) -> float:
    """Returns the bottleneck's share of the sum of all stages."""
    ends = np.cumsum([0, *counts])
    stages = np.add.reduceat(np.asarray(costs), ends[:-1])
    return float(stages.max() / stages.sum())


def _run_share(model: object, plan: Plan) -> float:
    """Returns the share of the slowest stage when the stages are run."""
    from tfgpipe._util import stage_spans
    from tfgpipe.capture import source_model
    from tfgpipe.costs import SegmentProfiler
    from tfgpipe.partition import example_microbatch
    from tfgpipe.runtime import example_tensor

    recorded = source_model.make_source(model).capture(None, {})
    specs = example_microbatch(recorded, None, 32, num_microbatches=4)
    spans = stage_spans(plan.calls_per_stage)
    profiler = SegmentProfiler(recorded.graph, spans, specs)
    inputs = {w: example_tensor(x, unknown_size=1) for w, x in specs.items()}
    costs = profiler.measure_seconds(inputs, "CPU:0")
    stages = [2 * cost.forward + cost.backward for cost in costs]  # remat="stage"
    return max(stages) / sum(stages)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compares the partition of each balance with the best of all."
    )
    parser.add_argument("--models", nargs="*", metavar="NAME")
    parser.add_argument("--calls", type=int, default=0, metavar="L", help="see above")
    parser.add_argument("--stages", type=int, default=4, help="K")
    parser.add_argument("--passes", type=int, default=3, help="of the reference")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
