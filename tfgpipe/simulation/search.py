"""Search for the schedule with the least step, and a bound on how good one can be.

The devices and passes are a job shop. Its parts:

    named schedules ─┐
    list schedules ──┼─▶ best ─▶ moves of single actions ─▶ exact search ─▶ the schedule
    building blocks ─┘                                     (small K and M)
                         lower bound ──────────────────────────────────▶ the gap

* A list schedule runs on each device the pass that can start first; rules say which of
  several, and a cap how many microbatches a stage may have in flight.
* Building blocks repeat the passes of a microbatch after a period: what counts where
  there are many microbatches.
* Moves put an action elsewhere in the order of its device, as long as that helps.
* The exact search is a branch and bound over active schedules (Giffler and Thompson
  1960, "Algorithms for Solving Production-Scheduling Problems"): no pass could start
  earlier without another starting later. Where memory is limited a device may also
  leave a forward until after its next backward.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

from tfgpipe._util import argument_checks
from tfgpipe.schedules import NAMES, Action, DataFlow, Schedule, find
from tfgpipe.simulation.building_blocks import best_of_blocks
from tfgpipe.simulation.shop import (
    BACKWARD,
    FORWARD,
    TOLERANCE,
    WEIGHT,
    Order,
    Orders,
    Run,
    Shop,
)
from tfgpipe.simulation.simulator import Costs, simulate


@dataclasses.dataclass(frozen=True)
class BestSchedule:
    """The best schedule that a search has found.

    Attributes:
        schedule: The schedule.
        step_time: Seconds of a step.
        lower_bound: Seconds that no schedule takes less than.
    """

    schedule: Schedule
    step_time: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """The most by which another schedule may be better, of this one's time."""
        if not self.step_time:
            return 0.0
        return max(1 - self.lower_bound / self.step_time, 0.0)

    @property
    def verdict(self) -> str:
        """The gap in words."""
        if self.gap <= TOLERANCE:
            return "none is better"
        return f"at most {100 * self.gap:.1f}% better exists"

    def __str__(self) -> str:
        time = f"{1e3 * self.step_time:,.2f} ms a step"
        return f"{self.schedule.name}: {time}; {self.verdict}"


def best_schedule(
    costs: Costs,
    placement: Sequence[int],
    num_microbatches: int,
    *,
    flow: DataFlow | None = None,
    memory_limit: float | Sequence[float] | None = None,
    splits_backwards: bool = True,
    effort: int = 300_000,
) -> BestSchedule:
    """Returns the schedule with the least step that a search finds.

    It is never worse than a named schedule that fits the devices and their memory.

    >>> costs = tfgpipe.Costs(forward=[1, 1, 1, 3], backward=[2, 2, 2, 6])
    >>> found = tfgpipe.best_schedule(costs, range(4), 6, splits_backwards=False)
    >>> found.step_time, found.lower_bound
    (63.0, 63.0)

    Args:
        costs: The costs of actions and transfers.
        placement: For each of the K stages the index of its device.
        num_microbatches: M.
        flow: The data flow between the stages. Defaults to a line.
        memory_limit: Bytes of a device, or of each, or None for no limit. Counted are
            those in `costs`, as a simulation does and as a plan does.
        splits_backwards: True if backwards may run in two halves.
        effort: Number of passes that may be simulated by each of three: the moves, the
            building blocks, and the exact search.

    Raises:
        ValueError: If no schedule found stays within the limit, or the costs are of
            another number of stages.
    """
    K = len(placement)
    argument_checks.check_schedule_size(K, num_microbatches)
    argument_checks.check_instance("costs", costs, Costs)
    costs.check_num_stages(K)
    limits = argument_checks.of_each_device(
        "memory_limit",
        argument_checks.check_memory_limit(memory_limit),
        max(placement, default=0) + 1,
        math.inf,
    )
    flow = flow or DataFlow.line(K)
    searches = [
        _Search(Shop(costs, placement, num_microbatches, flow, limits, splits=splits))
        for splits in ([False, True] if splits_backwards else [False])
    ]
    best, bound = _best_of(searches, effort)
    if best is None:
        raise ValueError(
            "A schedule stays within the memory of each device. Received "
            f"memory_limit={memory_limit} bytes, within which none was found for "
            f"{K} stages. Use more stages, more microbatches, or remat."
        )
    schedule = best.search.schedule(best)
    time = simulate(schedule, costs).timeline.step_time
    return BestSchedule(schedule, time, bound)


def _best_of(
    searches: Sequence[_Search], effort: int
) -> tuple[_Candidate | None, float]:
    """Returns the best schedule that is found, and the lower bound."""
    bounds = [search.shop.lower_bound for search in searches]
    found = [search.candidates(effort) for search in searches]
    best = min(itertools.chain(*found), key=_Candidate.key, default=None)
    for i, (search, own) in enumerate(zip(searches, found, strict=True)):
        if best is not None and best.time <= min(bounds) * (1 + TOLERANCE):
            continue
        blocks = best_of_blocks(search.shop, search.of_run, effort)
        own += [] if blocks is None else [blocks]
        if not own:
            continue
        start = search.improved(min(own, key=_Candidate.key), effort)
        candidate, is_optimal = search.exact(start, effort)
        if is_optimal:
            bounds[i] = candidate.time
        if best is None or candidate.time < best.time * (1 - TOLERANCE):
            best = candidate
    return best, min(bounds)


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A schedule of a shop.

    Attributes:
        search: The search that found it.
        orders: For each device its passes in order.
        time: Seconds of a step.
        held: The most microbatches in flight of each device, added up.
        name: Its name.
    """

    search: _Search
    orders: Orders
    time: float
    held: int
    name: str = "auto"

    def key(self) -> tuple[float, int]:
        """Returns time and memory: of equal times the one that holds less is better."""
        return float(f"{self.time:.9g}"), self.held


# Ranks a pass by its kind and stage, among those that can start at once.
_Tie = Callable[[int, int], tuple[int, ...]]


class _Search:
    """The search for the best schedule of a shop.

    Args:
        shop: The shop.
    """

    def __init__(self, shop: Shop) -> None:
        self.shop = shop

    def named(self) -> Iterator[tuple[str, Orders]]:
        """Yields the named schedules that there are for these devices."""
        for name in NAMES:
            policy = find(name)
            try:
                schedule = policy.on(self.shop.placement, self.shop.M, self.shop.flow)
            except ValueError:
                continue
            if schedule.splits_backwards == self.shop.splits:
                orders = (
                    itertools.chain(*map(self._passes_of, order))
                    for order in schedule.orders
                )
                yield name, tuple(map(tuple, orders))

    def _passes_of(self, action: Action) -> Order:
        """Returns the passes of an action, of a whole backward both halves."""
        k = action.stage
        if action.kind in self.shop.kinds:
            return ((self.shop.kinds.index(action.kind), k),)
        return (BACKWARD, k), (WEIGHT, k)

    def candidates(self, effort: int) -> list[_Candidate]:
        """Returns the named schedules and the list schedules that stay in memory.

        Without effort there is one list schedule.
        """
        found = [self.candidate(orders, name) for name, orders in self.named()]
        least = self.shop.lower_bound * (1 + TOLERANCE)
        for candidate in itertools.islice(self.list_schedules(), None if effort else 1):
            found.append(candidate)
            if candidate is not None and candidate.time <= least:
                break  # None is faster.
        return [x for x in found if x is not None]

    def candidate(self, orders: Orders, name: str = "auto") -> _Candidate | None:
        """Returns a schedule with its time; None if it deadlocks, or lacks memory."""
        run, heads = Run(self.shop), [0] * self.shop.num_devices
        while run.left:
            before = run.left
            for p, order in enumerate(orders):
                while heads[p] < len(order) and run.allows(*order[heads[p]]):
                    run.append(*order[heads[p]])
                    heads[p] += 1
            if run.left == before:
                return None
        return self.of_run(run, name)

    def of_run(self, run: Run, name: str = "auto") -> _Candidate | None:
        """Returns the schedule of a run that has ended; None if it lacks memory."""
        if not run.is_planned_within_limits:
            return None
        return _Candidate(self, run.orders, run.end, sum(run.most), name)

    def list_schedules(self) -> Iterator[_Candidate | None]:
        """Yields schedules by rules, for caps of microbatches in flight."""
        heights, M = self.shop.flow.heights, self.shop.M
        caps = [tuple(min(h + extra, M) for h in heights) for extra in range(4)]
        caps += [tuple(min(2 * h, M) for h in heights), (M,) * len(heights)]
        if any(self.shop.is_limited):  # At last one microbatch after the other.
            caps += [tuple(min(h, cap) for h in heights) for cap in _fewer(heights)]
        longest = max(map(max, self.shop.seconds[:2]))
        rules = [
            ((forward * longest, 0.0, weight * longest), first)
            for first in self._orders_of_ties()
            for forward in (0.0, 0.5)
            for weight in ((0.0, 0.5, 1.0, 2.0) if self.shop.splits else (0.0,))
        ]
        known = set()
        for cap, (delays, first) in itertools.product(dict.fromkeys(caps), rules):
            run = self.list_schedule(cap, delays, first)
            if run is not None and run.orders not in known:
                known.add(run.orders)
                yield self.of_run(run)

    def _orders_of_ties(self) -> list[_Tie]:
        """Returns the orders of passes that can start at once, which are tried."""

        def by_kind(kind: int, k: int) -> tuple[int, ...]:
            del k
            return ((1, 0, 2)[kind],)

        def by_stage(kind: int, k: int) -> tuple[int, ...]:
            # What takes no time; then from the first stage on, for which others wait.
            takes_time = self.shop.seconds[kind][k] > 0
            return takes_time, kind == WEIGHT, k, kind

        has_choice = self.shop.num_devices < len(self.shop.placement)
        return [by_kind, by_stage] if has_choice else [by_kind]

    def list_schedule(
        self, caps: Sequence[int], delays: Sequence[float], first: _Tie
    ) -> Run | None:
        """Returns a list schedule, or None if memory lets it not end.

        Args:
            caps: The most microbatches in flight of each stage.
            delays: Seconds by which a pass of each kind is put behind others.
            first: The order of passes that can start at once.
        """
        run = Run(self.shop)

        def rank(kind: int, k: int, start: float) -> tuple[float, ...] | None:
            if kind == FORWARD and run.in_flight(k) >= caps[k]:
                return None
            # A device that waits for nothing else runs what there is.
            return start + delays[kind], *first(kind, k)

        return run if run.finish(rank) else None

    def improved(self, best: _Candidate, effort: int) -> _Candidate:
        """Returns a schedule that moves of single passes lead to."""
        draw = random.Random(0)
        for _ in range(effort // sum(map(len, best.orders))):
            if best.time <= self.shop.lower_bound * (1 + TOLERANCE):
                break
            p = draw.randrange(self.shop.num_devices)
            order = list(best.orders[p])
            i = draw.randrange(len(order))
            j = max(0, min(len(order) - 1, i + draw.choice((-4, -2, -1, 1, 2, 4))))
            if order[i] == order[j]:
                continue
            order.insert(j, order.pop(i))
            moved = self.candidate(
                (*best.orders[:p], tuple(order), *best.orders[p + 1 :])
            )
            if moved is not None and moved.time <= best.time:
                best = moved
        return best

    def exact(self, best: _Candidate, effort: int) -> tuple[_Candidate, bool]:
        """Returns a schedule, and whether it is proven that none is better."""
        pending, left = [Run(self.shop)], effort // sum(map(len, best.orders))
        while pending and left:
            run = pending.pop()
            left -= 1
            if run.bound() >= best.time * (1 - TOLERANCE):
                continue
            if run.left:  # The most promising is visited first.
                pending += sorted(run.branches(), key=lambda x: -x.bound())
            else:
                best = self.of_run(run) or best
        return best, not pending and self.shop.is_complete

    def schedule(self, best: _Candidate) -> Schedule:
        """Returns a schedule, checked."""
        if best.name in NAMES:  # Its microbatches may go in another order.
            named = find(best.name).on(self.shop.placement, self.shop.M, self.shop.flow)
            time = simulate(named, self.shop.costs).timeline.step_time
            if time <= best.time * (1 + TOLERANCE):
                return named
        orders = []
        for order in best.orders:
            counts: collections.Counter[tuple[int, int]] = collections.Counter()
            actions = []
            for kind, k in order:
                actions.append(Action(self.shop.kinds[kind], k, counts[kind, k]))
                counts[kind, k] += 1
            orders.append(tuple(actions))
        K = len(self.shop.placement)
        return Schedule(
            K, self.shop.M, tuple(orders), "auto", self.shop.flow
        ).validate()


def _fewer(heights: Sequence[int]) -> list[int]:
    """Returns numbers of microbatches in flight, from most to 1 and ever closer."""
    counts = [max(heights) - 1]
    while counts[-1] > 1:
        counts.append(min(counts[-1] - 1, round(0.85 * counts[-1])))
    return [count for count in counts if count > 0]
