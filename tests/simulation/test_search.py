"""The search for schedules, beside all schedules there are."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest

from tfgpipe import Costs, best_schedule, schedules, simulate
from tfgpipe.schedules import Action, DataFlow, Schedule
from tfgpipe.simulation.building_blocks import best_of_blocks
from tfgpipe.simulation.shop import Run, Shop

pytestmark = pytest.mark.pure


def all_orders(stages: Sequence[int], M: int, kinds: Sequence[str]) -> Iterator[tuple]:
    """Yields all orders of a device in which passes of a kind and stage are in turn."""
    passes = [(kind, k) for k in stages for kind in kinds]

    def more(done: dict) -> Iterator[tuple]:
        if all(done[x] == M for x in passes):
            yield ()
        for i, (kind, k) in enumerate(passes):
            before = M if not i or passes[i - 1][1] != k else done[passes[i - 1]]
            if done[kind, k] < min(before, M):
                action = Action(kind, k, done[kind, k])
                for rest in more({**done, (kind, k): done[kind, k] + 1}):
                    yield (action, *rest)

    yield from more(dict.fromkeys(passes, 0))


def least(costs: Costs, K: int, M: int, kinds: Sequence[str], limit: float) -> float:
    """Returns the time of the best of all schedules."""
    best = math.inf
    for orders in itertools.product(
        *(list(all_orders([k], M, kinds)) for k in range(K))
    ):
        try:
            schedule = Schedule(K, M, orders, "one").validate()
        except ValueError:
            continue
        found = simulate(schedule, costs)
        if max(found.peak_bytes) <= limit:
            best = min(best, found.timeline.step_time)
    return best


WHOLE = ("forward", "backward")
HALVES = ("forward", "backward_input", "backward_weight")
SMALL = [
    *((2, 3, WHOLE, 9), (3, 2, WHOLE, 9), (2, 4, WHOLE, 2), (3, 3, WHOLE, 2)),
    *((2, 4, WHOLE, 1), (2, 2, HALVES, 9), (2, 2, HALVES, 1)),
]


def drawn(draw: random.Random, K: int) -> Costs:
    def each(least: float, most: float) -> list[float]:
        return [round(draw.uniform(least, most), 2) for _ in range(K)]

    return Costs(forward=each(0.5, 2), backward=each(1, 4), latency=0.1, kept_bytes=1.0)


@pytest.mark.parametrize(("K", "M", "kinds", "limit"), SMALL)
@pytest.mark.parametrize("seed", range(3))
def test_small_ones_are_the_best_of_all(K, M, kinds, limit, seed):
    costs = drawn(random.Random(seed), K)
    found = best_schedule(
        costs, range(K), M, memory_limit=limit, splits_backwards=kinds is HALVES
    )
    expected = least(costs, K, M, kinds, limit)
    if kinds is HALVES:
        expected = min(expected, least(costs, K, M, WHOLE, limit))
    assert found.step_time == pytest.approx(expected)
    assert found.lower_bound <= expected * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_none_is_worse_than_the_named_ones_nor_better_than_the_bound(seed):
    draw = random.Random(seed)
    K, M = draw.choice([2, 3, 4, 6]), draw.choice([6, 8, 12])
    costs = drawn(draw, K)
    found = best_schedule(costs, range(K), M, effort=20_000)
    simulated = simulate(found.schedule, costs)
    assert found.step_time == simulated.timeline.step_time
    for name in ("gpipe", "1f1b", "zero_bubble"):
        named = schedules.find(name).on(range(K), M)
        assert found.step_time <= simulate(named, costs).timeline.step_time + 1e-9
    assert found.lower_bound <= found.step_time + 1e-9
    work = zip(costs.forward, costs.backward, strict=True)
    assert found.lower_bound >= max(M * (f + b) for f, b in work) - 1e-9


@pytest.mark.parametrize("limit", [2.5, 3.0, 5.5])
def test_devices_stay_within_their_memory(limit):
    costs = dataclasses.replace(
        drawn(random.Random(5), 4), fixed_bytes=[0, 1, 0, 0.5], backward_bytes=0.5
    )
    found = best_schedule(costs, range(4), 6, memory_limit=limit, effort=20_000)
    assert max(simulate(found.schedule, costs).peak_bytes) <= limit
    with pytest.raises(ValueError, match="none was found for 4 stages"):
        best_schedule(costs, range(4), 6, memory_limit=2.4)


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_finds_the_memory_that_the_search_has_found(seed):
    draw = random.Random(seed)
    placement = draw.choice([(0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1)])
    costs = dataclasses.replace(
        drawn(draw, 4), kept_bytes=[3, 1, 2, 1], backward_bytes=[1, 4, 2, 3]
    )
    M, limit = 6, draw.choice([14, 20, 30])
    found = best_schedule(costs, placement, M, memory_limit=limit, effort=10_000)
    schedule = found.schedule
    for p in set(placement):
        stages = [k for k in range(4) if placement[k] == p]
        held = sum(schedule.in_flight[k] * costs.kept_bytes[k] for k in stages)
        begun = (schedule.in_backward[k] * costs.backward_bytes[k] for k in stages)
        assert held + max(begun) <= limit


def test_one_microbatch_after_the_other_is_found_where_nothing_else_fits():
    costs = Costs(kept_bytes=5, fixed_bytes=10, backward_bytes=2)
    found = best_schedule(costs, (0, 1, 1, 0), 6, memory_limit=32)
    assert found.schedule.in_flight == (1, 1, 1, 1)
    with pytest.raises(ValueError, match="none was found for 4 stages"):
        best_schedule(costs, (0, 1, 1, 0), 6, memory_limit=31)


def test_no_more_are_in_flight_than_there_is_memory_for():
    """Of 12 microbatches two at a time, each for four forwards and four backwards."""
    found = best_schedule(
        Costs(kept_bytes=1.0), range(4), 12, memory_limit=2, splits_backwards=False
    )
    whole = (1 + 2) * 4
    assert found.lower_bound == 12 / 2 * whole
    assert found.step_time >= found.lower_bound
    assert max(found.schedule.in_flight) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_building_blocks_of_many_microbatches_are_near_the_bound(seed):
    """Two stages a device, whole backwards, where named ones take 2 to 9% longer."""
    draw = random.Random(seed)
    K, M = 12, 48
    costs, placement = drawn(draw, K), [min(k, K - 1 - k) for k in range(K)]
    found = best_schedule(costs, placement, M, splits_backwards=False, effort=100_000)
    assert found.gap < 0.05


def test_a_building_block_is_repeated():
    shop = Shop(Costs(), range(4), 40, DataFlow.line(4), [math.inf] * 4, splits=True)
    run = best_of_blocks(shop, lambda run: run, effort=0)
    assert run is None
    run = best_of_blocks(shop, lambda run: _Ended(run, run.end), effort=shop.num_passes)
    for p, order in enumerate(run.run.orders):
        middle = order[3 * 12 : 3 * 28]
        assert {*middle[:3]} == {(kind, p) for kind in range(3)}
        assert middle == 16 * middle[:3]


@dataclasses.dataclass
class _Ended:
    run: Run
    time: float


def test_costs_of_other_stages_are_refused():
    with pytest.raises(ValueError, match=r"`forward` .* 4 here"):
        best_schedule(Costs(forward=[1, 2]), range(4), 6)
    with pytest.raises(TypeError, match="must be a Costs"):
        best_schedule("x", range(4), 6)
    with pytest.raises(ValueError, match=r"recompute_when=.late."):
        Costs(recompute_when="late")


def test_stages_share_devices_and_stand_side_by_side():
    """Two encoders of two stages, one device for both ends: nothing need wait."""
    flow = DataFlow(((), (0,), (), (2,), (1, 3)))
    found = best_schedule(Costs(), (0, 1, 0, 1, 1), 4, flow=flow)
    assert found.schedule.placement == (0, 1, 0, 1, 1)
    assert found.schedule.data_flow == flow
    # The second device has three stages, 3 each, four times; 1 before its first.
    assert found.lower_bound == found.step_time == 4 * 3 * 3 + 1


def test_unit_costs_give_the_schedules_of_the_papers():
    for name, splits in (("1f1b", False), ("zero_bubble", True)):
        found = best_schedule(Costs(), range(4), 8, splits_backwards=splits)
        assert found.schedule == schedules.find(name).on(range(4), 8)
        assert found.gap == 0
    assert str(found) == "zero_bubble: 27,000.00 ms a step; none is better"


@pytest.mark.parametrize(("P", "M", "head"), [(4, 16, 0.1), (4, 16, 4), (8, 32, 1)])
def test_a_head_in_parts_costs_its_work_alone(P, M, head):
    """With two microbatches more than 1F1B (Yeung et al. 2024, section 5).

    Of blocks and head a device has (1 + head / P) of forwards, and backwards of twice
    that, for each microbatch; and it waits for the blocks of the others.
    """
    forward = [1.0] * P + [head / P] * P + [0.0]
    costs = Costs(
        forward=forward,
        backward=[2 * x for x in forward],
        kept_bytes=[1.0] * P + [0.0] * (P + 1),
    )
    line = DataFlow.line(P).sources
    flow = DataFlow((*line, *[(P - 1,)] * P, tuple(range(P, 2 * P))))
    found = best_schedule(
        costs,
        [*range(P), *range(P), P - 1],
        M,
        flow=flow,
        splits_backwards=False,
        memory_limit=P + 2,
        effort=1,
    )
    least = 3 * (M * (1 + head / P) + P - 1)
    assert found.step_time == pytest.approx(least)
    assert simulate(found.schedule, costs).timeline.step_time == pytest.approx(least)
