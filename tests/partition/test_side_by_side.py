"""Partitions of branches, beside all partitions there are."""

from __future__ import annotations

import itertools
import random

import pytest

from tfgpipe import Costs, schedules, simulate
from tfgpipe.partition.side_by_side import step_cost, with_branches_apart
from tfgpipe.schedules import DataFlow

pytestmark = pytest.mark.pure


def branches(*lengths: int, head: int) -> DataFlow:
    """Returns the data flow of branches of these lengths, which a head joins."""
    sources: list[tuple[int, ...]] = []
    ends = []
    for length in lengths:
        first = len(sources)
        sources += [(i - 1,) if i > first else () for i in range(first, first + length)]
        ends.append(len(sources) - 1)
    sources.append(tuple(ends))
    sources += [(i - 1,) for i in range(len(sources), len(sources) + head - 1)]
    return DataFlow(tuple(sources))


def apart(counts, costs, flow, M):
    return with_branches_apart(
        counts,
        costs,
        flow,
        num_microbatches=M,
        may_start=[True] * len(costs),
        new_row=lambda: lambda s, e: [0] * (e - s),
    )


def simulated(counts, costs, flow, M) -> float:
    """Returns the step of 1F1B, of backwards that take twice as long."""
    forward = _stages(counts, costs)
    order = schedules.one_f_one_b(len(counts), M, flow=flow.grouped(counts))
    times = Costs(forward=forward, backward=[2 * x for x in forward])
    return simulate(order, times).timeline.step_time


def partitions(L: int, K: int):
    for ends in itertools.combinations(range(1, L), K - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, L)))


@pytest.mark.parametrize("M", [4, 8, 32])
@pytest.mark.parametrize("seed", range(4))
def test_two_encoders_are_as_good_as_the_best_of_all_partitions(seed, M):
    draw = random.Random(seed)
    flow = branches(draw.randint(3, 5), draw.randint(3, 5), head=2)
    costs = [draw.choice([1.0, 1.0, 1.5]) for _ in flow.sources]
    K = 4
    every = [*partitions(len(costs), K)]
    first = min(every, key=lambda x: max(_stages(x, costs)))
    found = apart(first, costs, flow, M)
    assert sum(found) == len(costs)
    assert len(found) == K
    best = min(step_cost(x, costs, flow, M) for x in every)
    assert step_cost(found, costs, flow, M) <= 1.05 * best
    assert simulated(found, costs, flow, M) <= 1.01 * simulated(first, costs, flow, M)


def test_encoders_of_one_stage_each_take_as_long_as_one():
    flow, costs = branches(4, 4, head=4), [1.0] * 12
    assert apart((3, 5, 4), costs, flow, 4) == (4, 4, 4)
    line = simulated((4, 4, 4), costs, DataFlow.line(12), 4)
    # Forward and backward of one stage less.
    assert line - simulated((4, 4, 4), costs, flow, 4) == 3 * 4


def test_a_line_and_a_small_branch_stay_as_they_are():
    costs = [2.0, 0.1, 1.0, 1.0, 2.0]
    assert apart((1, 2, 2), costs, DataFlow.line(5), 4) == (1, 2, 2)
    # An embedding of positions beside that of tokens.
    flow = DataFlow(((), (), (0, 1), (2,), (3,)))
    assert apart((1, 3, 1), costs, flow, 4) == (1, 3, 1)


def test_fewer_stages_than_branches_stay_as_they_are():
    flow = branches(2, 2, 2, head=1)
    assert apart((4, 3), [1.0] * 7, flow, 4) in [(4, 3), (2, 5)]
    assert apart((7,), [1.0] * 7, flow, 4) == (7,)


def _stages(counts, costs):
    ends = [0, *itertools.accumulate(counts)]
    return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
