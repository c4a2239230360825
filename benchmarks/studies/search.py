"""The best named schedule takes up to 15% longer than one found by search.

Schedules found by search beside the named ones, for stages of unequal cost.

    python -m benchmarks.studies.search
    python -m benchmarks.studies.search --settings=10 --stages 16 --microbatches 64
    python -m benchmarks.studies.search --settings=10 --stages 16 --microbatches 32 \
        --folded
    python -m benchmarks.studies.search --settings=10 --stages 16 --microbatches 64 \
        --memory=0.5

Random settings: forwards take 0.5 to 2, backwards 1 to 4, a half of it for each half,
transfers 0.1. Then the decoder of `benchmarks.workloads`, as `tfgpipe.plan` cuts it by
parameters, whose last stage has the vocabulary. Folded, each device has two stages, the
first and the last one. With memory a device has room for that part of the microbatches
that the first stage of 1F1B has in flight. Columns: the step of the best named schedule
over that of the one found, whole backwards and split ones apart; how much better one
may be than what was found, by the lower bound; settings in which none is; seconds of a
search.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence

import tfgpipe
from benchmarks import tables
from tfgpipe import Costs, schedules


def settings(number: int, sizes: Sequence[tuple[int, int]]) -> list[tuple[Costs, int]]:
    """Returns random costs, with numbers of microbatches."""
    draw = random.Random(0)
    found = []
    for _ in range(number):
        K, M = draw.choice(sizes)
        forward = [draw.uniform(0.5, 2) for _ in range(K)]
        backward = [draw.uniform(1, 4) for _ in range(K)]
        costs = Costs(forward=forward, backward=backward, latency=0.1, kept_bytes=1.0)
        found.append((costs, M))
    return found


def best_named(
    costs: Costs, placement: Sequence[int], M: int, limit: float | None, *, splits: bool
) -> float:
    """Returns the step of the best named schedule; infinity if none has the memory."""
    least = math.inf
    for name in schedules.NAMES:
        try:
            schedule = schedules.find(name).on(placement, M)
        except ValueError:  # It is for other devices.
            continue
        found = tfgpipe.simulate(schedule, costs)
        fits = limit is None or max(found.peak_bytes) <= limit
        if fits and schedule.splits_backwards <= splits:
            least = min(least, found.timeline.step_time)
    return least


def compare(
    costs: Costs, M: int, *, splits: bool, folded: bool, memory: float | None
) -> tuple[float, float, float]:
    """Returns the best named step over the one found, the gap, and the seconds."""
    K = len(costs.forward) if isinstance(costs.forward, Sequence) else 1
    placement = [min(k, K - 1 - k) for k in range(K)] if folded else [*range(K)]
    limit = None if memory is None else memory * K
    named = best_named(costs, placement, M, limit, splits=splits)
    start = time.perf_counter()
    found = tfgpipe.best_schedule(
        costs, placement, M, memory_limit=limit, splits_backwards=splits
    )
    seconds = time.perf_counter() - start
    return named / found.step_time, found.gap, seconds


def gain(ratio: float) -> str:
    """Returns by how much a step is shorter, in per cent of the shorter one."""
    return "none fits" if math.isinf(ratio) else f"{100 * (ratio - 1):.1f}%"


def decoder(num_stages: int) -> Costs:
    """Returns the costs of the decoder's stages, in FLOPs."""
    from benchmarks import workloads

    workload = workloads.WORKLOADS["decoder"]()
    plan = tfgpipe.plan(
        workload.make_model(workload.make_layers()),
        num_stages=num_stages,
        num_microbatches=8,
        remat="none",
        sample=workload.make_data()[0],
    )
    third = [stage.flops / 3 for stage in plan.stages]
    scale = sum(third) / len(third)
    return Costs(
        forward=[x / scale for x in third], backward=[2 * x / scale for x in third]
    )


def main(arguments: list[str] | None = None) -> None:
    """Prints a row for the random settings, and one for each K of the decoder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=50)
    parser.add_argument("--stages", type=int, nargs="+", default=[3, 4, 6])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 12])
    parser.add_argument("--no_decoder", action="store_true")
    parser.add_argument("--folded", action="store_true")
    parser.add_argument("--memory", type=float)
    flags = parser.parse_args(arguments)
    sizes = [(K, M) for K in flags.stages for M in flags.microbatches if M >= K]
    cases = {f"{flags.settings} random": settings(flags.settings, sizes)}
    if not flags.no_decoder:
        cases |= {f"decoder, K={K}": [(decoder(K), 8)] for K in (2, 4)}
    rows: list[tables.Row] = []
    for name, some in cases.items():
        for splits in (False, True):
            found = [
                compare(
                    costs, M, splits=splits, folded=flags.folded, memory=flags.memory
                )
                for costs, M in some
            ]
            gains, gaps, seconds = zip(*found, strict=True)
            rows.append(
                {
                    "settings": name,
                    "backwards": "split" if splits else "whole",
                    "gain, median": gain(statistics.median(gains)),
                    "most": gain(max(gains)),
                    "gap, median": f"{100 * statistics.median(gaps):.1f}%",
                    "largest": f"{100 * max(gaps):.1f}%",
                    "none better": sum(gap < 1e-9 for gap in gaps),
                    "s, median": f"{statistics.median(seconds):.1f}",
                }
            )
    print(tables.draw(rows))


if __name__ == "__main__":
    main()
