"""Partition of a model whose parts do not all wait for one another.

Two encoders follow one another in the order of calls, and a head joins them. The
partition with the least bottleneck may have a stage with the end of one and the start
of the other. That stage makes the second encoder wait for the first:

    calls    a a a a | a b | b b b b | head        a a a a a | b b b b b | head

             0 ─▶ 1 ─▶ 2 ─▶ 3                      0 ─┐
                                                   1 ─┴─▶ 2

Of M microbatches a step takes at most the longest way through the stages, once, and
M - 1 times the slowest stage. So a stage that begins with an encoder is worth a
bottleneck that is a little larger, the more so the fewer microbatches there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy.typing as npt

from tfgpipe._util import stage_spans
from tfgpipe.partition.additive import best_additive_partition
from tfgpipe.schedules import DataFlow

# Where there are many first calls, such as embeddings, the first ones are tried.
_MOST_STARTS = 8
# The least relative gain for which a partition is changed.
_LEAST_GAIN = 1e-3


def step_cost(
    counts: Sequence[int], costs: Sequence[float], flow: DataFlow, M: int
) -> float:
    """Returns the most that a step costs: the longest way, and the slowest stage.

    >>> flow = DataFlow(((), (), (0, 1)))  # Of calls: two that a third joins.
    >>> step_cost([1, 1, 1], [2, 2, 1], flow, M=4)
    9.0

    Args:
        counts: The number of calls in each stage.
        costs: The cost of each call.
        flow: The data flow between calls.
        M: The number of microbatches.
    """
    stages = _stage_costs(counts, costs)
    ways: list[float] = []
    for cost, sources in zip(stages, flow.grouped(counts).sources, strict=True):
        ways.append(cost + max((ways[k] for k in sources), default=0.0))
    return float(max(ways) + (M - 1) * max(stages))


def _stage_costs(counts: Sequence[int], costs: Sequence[float]) -> list[float]:
    return [sum(costs[span]) for span in stage_spans(counts)]


def with_branches_apart(
    counts: Sequence[int],
    costs: Sequence[float],
    flow: DataFlow,
    *,
    num_microbatches: int,
    may_start: Sequence[bool],
    new_row: Callable[[], Callable[[int, int], npt.ArrayLike]],
) -> tuple[int, ...]:
    """Returns the partition, or a faster one of which a stage begins with a branch.

    >>> costs, K = [1] * 10 + [2], 3
    >>> encoders = [() if i in (0, 5) else (i - 1,) for i in range(10)]
    >>> flow = DataFlow((*encoders, (4, 9)))
    >>> with_branches_apart(
    ...     (4, 4, 3), costs, flow, num_microbatches=2, may_start=[True] * 11,
    ...     new_row=lambda: lambda s, e: [0] * (e - s),
    ... )
    (5, 5, 1)

    Args:
        counts: The number of calls in each stage.
        costs: The cost of each call.
        flow: The data flow between calls. A branch begins with one that reads none.
        num_microbatches: M.
        may_start: For each call whether a stage may start with it.
        new_row: Makes the function `received_row` of `best_additive_partition`.
    """
    K, M, L = len(counts), num_microbatches, len(costs)
    starts = [i for i in range(1, L) if not flow.sources[i] and may_start[i]]
    if not starts:
        return tuple(counts)
    starts = starts[:_MOST_STARTS]
    best, least = tuple(counts), step_cost(counts, costs, flow, M) * (1 - _LEAST_GAIN)
    for apart in [[i] for i in starts] + [starts] * (len(starts) > 1):
        bounds = [0, *apart, L]
        if len(bounds) - 1 > K:
            continue
        found = _of_each(bounds, K, costs, may_start, new_row)
        cost = step_cost(found, costs, flow, M)
        if cost < least:
            best, least = _descent(found, costs, flow, M, may_start)
    return best


def _descent(
    counts: Sequence[int],
    costs: Sequence[float],
    flow: DataFlow,
    M: int,
    may_start: Sequence[bool],
) -> tuple[tuple[int, ...], float]:
    """Returns the partition that moves of single boundaries lead to, and its step."""
    best, least = tuple(counts), step_cost(counts, costs, flow, M)
    again = True
    while again:
        again = False
        for k, move in itertools.product(range(1, len(best)), (-1, 1)):
            moved = list(best)
            moved[k - 1] += move
            moved[k] -= move
            if min(moved) < 1 or not may_start[sum(moved[:k])]:
                continue
            cost = step_cost(moved, costs, flow, M)
            if cost < least * (1 - _LEAST_GAIN):
                best, least, again = tuple(moved), cost, True
    return best, least


def _of_each(
    bounds: Sequence[int],
    num_stages: int,
    costs: Sequence[float],
    may_start: Sequence[bool],
    new_row: Callable[[], Callable[[int, int], npt.ArrayLike]],
) -> tuple[int, ...]:
    """Returns the best partition whose stages begin at all bounds.

    The next stage goes to where the slowest one is, as long as it may be split.
    """

    def part(start: int, end: int, stages: int) -> tuple[int, ...]:
        row = new_row()
        return best_additive_partition(
            costs[start:end],
            num_stages=stages,
            received_row=lambda s, e: row(start + s, start + e),
            may_start=may_start[start:end],
        )

    spans = [*itertools.pairwise(bounds)]
    most = [1 + sum(map(bool, may_start[a + 1 : b])) for a, b in spans]
    parts = [part(a, b, 1) for a, b in spans]
    for _ in range(num_stages - len(spans)):
        can = [i for i, counts in enumerate(parts) if len(counts) < most[i]]
        i = max(can, key=lambda i: max(_stage_costs(parts[i], costs[spans[i][0] :])))
        parts[i] = part(*spans[i], len(parts[i]) + 1)
    return tuple(itertools.chain(*parts))
