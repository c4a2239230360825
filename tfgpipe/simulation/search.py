"""Search for the schedule with the least step, and a bound on how good one can be.

Microbatches are alike, so each stage takes them in order, and what is left to decide is
which of its stages' passes a device runs next: a job shop. Its parts:

    named schedules ─┐
    list schedules ──┼─▶ best ─▶ moves of single actions ─▶ exact search ─▶ the schedule
    (rules, caps)    ┘                                     (small K and M)
                         lower bound ──────────────────────────────────▶ the gap

* A list schedule runs on each device the pass that can start first; rules say which of
  several, and a cap how many microbatches a stage may have in flight.
* Moves put an action elsewhere in the order of its device, as long as that helps.
* The exact search is a branch and bound over active schedules (Giffler and Thompson
  1960, "Algorithms for Solving Production-Scheduling Problems"): no pass could start
  earlier without another starting later. Where memory is limited a device may also
  leave a forward until after its next backward.
* The bound of a device is the time until its first backward can start, less the
  forwards that it can run till then, and all else that it has to run.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from tfgpipe._util import argument_checks
from tfgpipe.schedules import NAMES, Action, DataFlow, Schedule, find, kinds
from tfgpipe.simulation.simulator import Costs, simulate

# Passes by number: of a whole backward there is no third.
_F, _B, _W = range(3)
_TOLERANCE = 1e-9


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
        if self.gap <= _TOLERANCE:
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
        effort: Number of passes that the moves may simulate, and the exact search.

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
    shops = [
        _Shop(costs, placement, num_microbatches, flow, limits, splits=splits)
        for splits in ([False, True] if splits_backwards else [False])
    ]
    found = [x for shop in shops for x in shop.candidates(effort)]
    if not found:
        raise ValueError(
            "A schedule stays within the memory of each device. Received "
            f"memory_limit={memory_limit} bytes, within which none was found for "
            f"{K} stages. Use more stages, more microbatches, or remat."
        )
    best, bound = _best_of(shops, found, effort)
    schedule = best.shop.schedule(best)
    time = simulate(schedule, costs).timeline.step_time
    return BestSchedule(schedule, time, bound)


def _best_of(
    shops: Sequence[_Shop], found: Sequence[_Candidate], effort: int
) -> tuple[_Candidate, float]:
    """Returns the best schedule that candidates lead to, and the lower bound."""
    bounds = [shop.lower_bound for shop in shops]
    best = min(found, key=_Candidate.key)
    for i, shop in enumerate(shops):
        own = [x for x in found if x.shop is shop]
        if not own or best.time <= min(bounds) * (1 + _TOLERANCE):
            continue
        start = shop.improved(min(own, key=_Candidate.key), effort)
        candidate, is_optimal = shop.exact(start, effort)
        if is_optimal:
            bounds[i] = candidate.time
        if candidate.time < best.time * (1 - _TOLERANCE):
            best = candidate
    return best, min(bounds)


# Passes of a device in order, by kind and stage; those of each device.
_Order = tuple[tuple[int, int], ...]
_Orders = tuple[_Order, ...]


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A schedule of a shop.

    Attributes:
        shop: The shop.
        orders: For each device its passes in order.
        time: Seconds of a step.
        held: The most microbatches in flight of each device, added up.
        name: Its name.
    """

    shop: _Shop
    orders: _Orders
    time: float
    held: int
    name: str = "auto"

    def key(self) -> tuple[float, int]:
        """Returns time and memory: of equal times the one that holds less is better."""
        return float(f"{self.time:.9g}"), self.held


class _Shop:
    """A job shop: devices, the passes of stages, their times and bytes."""

    def __init__(
        self,
        costs: Costs,
        placement: Sequence[int],
        num_microbatches: int,
        flow: DataFlow,
        memory_limits: Sequence[float],
        *,
        splits: bool,
    ) -> None:
        K = len(placement)
        self.costs, self.placement, self.M = costs, tuple(placement), num_microbatches
        self.flow, self.splits = flow, splits
        self.num_devices = max(placement) + 1
        self.stages = [
            [k for k in range(K) if placement[k] == p] for p in range(self.num_devices)
        ]
        names = ["forward", "backward"]
        if splits:
            names = ["forward", "backward_input", "backward_weight"]
        self.kinds = [kinds.find(name) for name in names]
        self.seconds = [[costs.seconds(x, k) for k in range(K)] for x in names]
        self.recompute = [costs.seconds("recompute", k) for k in range(K)]
        self.kept = [costs.seconds("kept_bytes", k) for k in range(K)]
        self.again = [costs.seconds("backward_bytes", k) for k in range(K)]
        self.limits = [
            limit - sum(costs.seconds("fixed_bytes", k) for k in some)
            for limit, some in zip(memory_limits, self.stages, strict=True)
        ]
        self.is_limited = [
            math.isfinite(limit) and any(self.kept[k] or self.again[k] for k in some)
            for limit, some in zip(self.limits, self.stages, strict=True)
        ]
        passes = range(len(self.kinds))
        self.work = [
            self.M * sum(self.work_of(kind, k) for kind in passes for k in some)
            for some in self.stages
        ]
        # The seconds from the start of a step to that of a stage's first forward, and
        # from the start of a backward to the end of the last one that it leads to.
        self.heads, self.ways_back = [0.0] * K, [0.0] * K
        for k in range(K):
            for j in flow.sources[k]:
                sent = self.heads[j] + self.seconds[_F][j] + self.delay(j, k)
                self.heads[k] = max(self.heads[k], sent)
                back = self.delay(k, j) + self.ways_back[j]
                self.ways_back[k] = max(self.ways_back[k], back)
            self.ways_back[k] += self.work_of(_B, k, recompute=False)
        self.tails = [self._tail(some) for some in self.stages]

    def work_of(self, kind: int, k: int, *, recompute: bool = True) -> float:
        """Returns the seconds that a pass keeps its device busy."""
        again = self.recompute[k] if kind == _B and recompute else 0.0
        return self.seconds[kind][k] + again

    def delay(self, k: int, other: int) -> float:
        """Returns the seconds of a transfer over a free link."""
        if self.placement[k] == self.placement[other]:
            return 0.0
        return self.link_seconds(k, other) + self.costs.latency

    def _tail(self, stages: Sequence[int]) -> float:
        """Returns seconds that a step goes on for after the last pass of a device."""
        if self.splits:  # It may be a gradient of weights.
            return 0.0
        return min(
            max(
                (self.delay(k, j) + self.ways_back[j] for j in self.flow.sources[k]),
                default=0.0,
            )
            for k in stages
        )

    def link_seconds(self, k: int, other: int) -> float:
        """Returns the seconds in which a transfer keeps the link busy."""
        if self.placement[k] == self.placement[other]:
            return 0.0
        return (
            self.costs.seconds("boundary_bytes", min(k, other)) / self.costs.bandwidth
        )

    def named(self) -> Iterator[tuple[str, _Orders]]:
        """Yields the named schedules that there are for these devices."""
        for name in NAMES:
            policy = find(name)
            try:
                schedule = policy.on(self.placement, self.M, self.flow)
            except ValueError:
                continue
            if schedule.splits_backwards == self.splits:
                orders = (
                    itertools.chain(*map(self._passes_of, order))
                    for order in schedule.orders
                )
                yield name, tuple(map(tuple, orders))

    def _passes_of(self, action: Action) -> _Order:
        """Returns the passes of an action, of a whole backward both halves."""
        k = action.stage
        if action.kind in self.kinds:
            return ((self.kinds.index(action.kind), k),)
        return (_B, k), (_W, k)

    def candidates(self, effort: int) -> list[_Candidate]:
        """Returns the named schedules and the list schedules that stay in memory.

        Without effort there is one list schedule.
        """
        found = [self.candidate(orders, name) for name, orders in self.named()]
        lists = itertools.islice(self.list_schedules(), None if effort else 1)
        found += map(self.candidate, lists)
        return [x for x in found if x is not None]

    def candidate(self, orders: _Orders, name: str = "auto") -> _Candidate | None:
        """Returns a schedule with its time; None if it deadlocks, or lacks memory."""
        run, heads = _Run(self), [0] * self.num_devices
        while run.left:
            before = run.left
            for p, order in enumerate(orders):
                while heads[p] < len(order) and run.allows(*order[heads[p]]):
                    run.append(*order[heads[p]])
                    heads[p] += 1
            if run.left == before:
                return None
        if not run.is_planned_within_limits:
            return None
        return _Candidate(self, orders, run.end, sum(run.most), name)

    def list_schedules(self) -> Iterator[_Orders]:
        """Yields schedules by rules, for caps of microbatches in flight."""
        heights = self.flow.heights
        caps = [tuple(min(h + extra, self.M) for h in heights) for extra in range(4)]
        caps += [tuple(min(2 * h, self.M) for h in heights), (self.M,) * len(heights)]
        if any(self.is_limited):  # At last one microbatch after the other.
            most = range(max(heights) - 1, 0, -1)
            caps += [tuple(min(h, cap) for h in heights) for cap in most]
        longest = max(map(max, self.seconds[:2]))
        rules = [
            (forward * longest, weight * longest)
            for forward in (0.0, 0.5)
            for weight in ((0.0, 0.5, 1.0, 2.0) if self.splits else (0.0,))
        ]
        known = set()
        for cap, (forward, weight) in itertools.product(dict.fromkeys(caps), rules):
            orders = self.list_schedule(cap, (forward, 0.0, weight))
            if orders is not None and orders not in known:
                known.add(orders)
                yield orders

    def list_schedule(
        self, caps: Sequence[int], delays: Sequence[float]
    ) -> _Orders | None:
        """Returns a list schedule, or None if memory lets it not end.

        Args:
            caps: The most microbatches in flight of each stage.
            delays: Seconds by which a pass of each kind is put behind others.
        """
        run = _Run(self)
        while run.left:
            best: tuple[float, int, int, int] | None = None
            for kind, k in run.eligible():
                if kind == _F and run.in_flight(k) >= caps[k]:
                    continue
                start = run.start(kind, k)
                # A device that waits for nothing else runs what there is.
                entry = start + delays[kind], (1, 0, 2)[kind], -k, kind
                if best is None or entry < best:
                    best = entry
            if best is None:
                return None
            run.append(best[3], -best[2])
        return run.orders

    def improved(self, best: _Candidate, effort: int) -> _Candidate:
        """Returns a schedule that moves of single passes lead to."""
        draw = random.Random(0)
        for _ in range(effort // sum(map(len, best.orders))):
            if best.time <= self.lower_bound * (1 + _TOLERANCE):
                break
            p = draw.randrange(self.num_devices)
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
        pending, left = [_Run(self)], effort // sum(map(len, best.orders))
        while pending and left:
            run = pending.pop()
            left -= 1
            if run.bound() >= best.time * (1 - _TOLERANCE):
                continue
            if run.left:  # The most promising is visited first.
                pending += sorted(run.branches(), key=lambda x: -x.bound())
            elif run.is_planned_within_limits:
                best = _Candidate(self, run.orders, run.end, sum(run.most))
        return best, not pending and self.is_complete

    @property
    def is_complete(self) -> bool:
        """True if the branches of an exact search lead to a best schedule.

        They do if a pass that runs earlier delays none: neither on a link, nor by
        recomputation before it, nor for want of memory.
        """
        costs, limited = self.costs, any(self.is_limited)
        free_links = math.isinf(costs.bandwidth) or not costs.boundary_bytes
        one_each = self.num_devices == len(self.placement)
        lean = one_each and not (self.splits and any(self.again))
        asked = costs.recompute_when == "asked" or not any(self.recompute)
        return free_links and asked and (lean or not limited)

    @functools.cached_property
    def lower_bound(self) -> float:
        """Seconds that no schedule takes less than."""
        return max(map(self._bound_of, range(self.num_devices)))

    def _bound_of(self, p: int) -> float:
        """Returns the bound of a device: see the module."""
        stages = self.stages[p]
        forwards = self.M * sum(self.seconds[_F][k] for k in stages)
        least = min(self.kept[k] for k in stages)
        if least and self.is_limited[p]:
            longest = max(self.seconds[_F][k] for k in stages)
            forwards = min(forwards, self.limits[p] // least * longest)
        until = min(map(self._first_backward, stages))
        head = min(self.heads[k] for k in stages)
        rest = self.work[p] - forwards
        return max(head + self.work[p], until + rest) + self.tails[p]

    def _first_backward(self, k: int) -> float:
        """Returns the seconds until the first backward of a stage can start."""
        # From its forward to the end, and back.
        ways = [0.0] * len(self.placement)
        for j in reversed(range(k, len(ways))):
            for i in self.flow.targets[j]:
                way = self.delay(j, i) + ways[i] + self.delay(i, j)
                way += self.work_of(_B, i, recompute=False)
                ways[j] = max(ways[j], way)
            ways[j] += self.seconds[_F][j]
        return self.heads[k] + ways[k]

    def schedule(self, best: _Candidate) -> Schedule:
        """Returns a schedule, checked."""
        if best.name in NAMES:  # Its microbatches may go in another order.
            named = find(best.name).on(self.placement, self.M, self.flow)
            time = simulate(named, self.costs).timeline.step_time
            if time <= best.time * (1 + _TOLERANCE):
                return named
        orders = []
        for order in best.orders:
            counts: collections.Counter[tuple[int, int]] = collections.Counter()
            actions = []
            for kind, k in order:
                actions.append(Action(self.kinds[kind], k, counts[kind, k]))
                counts[kind, k] += 1
            orders.append(tuple(actions))
        K = len(self.placement)
        return Schedule(K, self.M, tuple(orders), "auto", self.flow).validate()


class _Run:
    """The passes that devices have run so far, each in its order.

    Attributes:
        left: Number of passes that are still to run.
        most: The most microbatches in flight of each device.
        end: Seconds until all that has run has ended.
    """

    def __init__(self, shop: _Shop) -> None:
        K, P = len(shop.placement), shop.num_devices
        self.shop = shop
        self.done = [[0] * K for _ in shop.kinds]
        self.order: list[_Order] = [()] * P
        self.free, self.held, self.begun = [0.0] * P, [0.0] * P, [0.0] * P
        self.flight, self.most = [0] * P, [0] * P
        # What devices held when they had most in flight, and the most that backwards
        # under way hold of a stage.
        self.held_at_most = [0.0] * P
        self.most_begun = [0.0] * P
        self.work_left = list(shop.work)
        # A device that leaves its forwards until after its next backward.
        self.waits = [False] * P
        self.links: dict[tuple[int, int], float] = {}
        # Arrivals of results by kind, sender and receiver, microbatch by microbatch.
        self.arrivals: dict[tuple[int, int, int], tuple[float, ...]] = {}
        self.left, self.end = K * shop.M * len(shop.kinds), 0.0

    def copy(self) -> _Run:
        """Returns a copy that goes on by itself."""
        copy = object.__new__(_Run)
        for name, value in vars(self).items():
            if isinstance(value, list):
                value = [list(x) if isinstance(x, list) else x for x in value]
            setattr(copy, name, dict(value) if isinstance(value, dict) else value)
        return copy

    @property
    def orders(self) -> _Orders:
        """For each device its passes in order."""
        return tuple(self.order)

    def in_flight(self, k: int) -> int:
        """Returns the number of microbatches in flight at a stage."""
        return self.done[_F][k] - self.done[-1][k]

    @property
    def is_planned_within_limits(self) -> bool:
        """True if a plan finds memory for this order: `StepLoad`'s law of memory."""
        needs = zip(self.held_at_most, self.most_begun, self.shop.limits, strict=True)
        return all(held + begun <= limit for held, begun, limit in needs)

    def allows(self, kind: int, k: int) -> bool:
        """Returns whether what a pass needs has been run, and its memory is there."""
        shop, m, p = self.shop, self.done[kind][k], self.shop.placement[k]
        if kind == _F:
            if m == shop.M or self.waits[p]:
                return False
            if any(self.done[_F][j] <= m for j in shop.flow.sources[k]):
                return False
            held = self.held[p] + shop.kept[k]
            # A backward of some stage has to fit in later.
            begun = [j for j in shop.stages[p] if j == k or self.in_flight(j)]
            again = max(self.begun[p], min(shop.again[j] for j in begun))
            return held + again <= shop.limits[p]
        if kind == _W:
            return m < self.done[_B][k]
        if m >= self.done[_F][k]:
            return False
        if any(self.done[_B][j] <= m for j in shop.flow.targets[k]):
            return False
        return self.held[p] + self.begun[p] + shop.again[k] <= shop.limits[p]

    def start(self, kind: int, k: int) -> float:
        """Returns the seconds until a pass can start that is allowed."""
        return max(self.free[self.shop.placement[k]], self._ready(kind, k))

    def _ready(self, kind: int, k: int) -> float:
        """Returns the seconds until what it needs from others has arrived."""
        if kind == _W:
            return 0.0
        flow, m = self.shop.flow, self.done[kind][k]
        needed = flow.sources[k] if kind == _F else flow.targets[k]
        return max((self.arrivals[kind, j, k][m] for j in needed), default=0.0)

    def end_of(self, kind: int, k: int) -> float:
        """Returns the seconds until a pass has ended that would be run now."""
        shop, p = self.shop, self.shop.placement[k]
        start = self.start(kind, k)
        if kind == _B and shop.recompute[k]:
            early = shop.costs.recompute_when == "early"
            begun = self.free[p] if early else start
            start = max(begun + shop.recompute[k], start)
        return start + shop.seconds[kind][k]

    def append(self, kind: int, k: int) -> None:
        """Runs a pass that is allowed."""
        shop, p = self.shop, self.shop.placement[k]
        end = self.end_of(kind, k)
        targets = (shop.flow.targets[k], shop.flow.sources[k], ())[kind]
        for other in targets:
            arrival = end
            if shop.placement[other] != p:
                link = p, shop.placement[other]
                sent = max(end, self.links.get(link, 0.0)) + shop.link_seconds(k, other)
                self.links[link] = sent
                arrival = sent + shop.costs.latency
            known = self.arrivals.get((kind, k, other), ())
            self.arrivals[kind, k, other] = (*known, arrival)
        self.free[p] = end
        self.end = max(self.end, end)
        if kind == _F:
            self.held[p] += shop.kept[k]
            self.flight[p] += 1
            if self.flight[p] > self.most[p]:
                self.most[p], self.held_at_most[p] = self.flight[p], self.held[p]
        else:
            self.waits[p] = False
        if kind == _B and shop.splits:
            self.begun[p] += shop.again[k]
        if kind == len(shop.kinds) - 1:
            self.held[p] -= shop.kept[k]
            self.flight[p] -= 1
            self.begun[p] -= shop.again[k] if shop.splits else 0.0
        self.done[kind][k] += 1
        begun = self.done[_B][k] - self.done[-1][k] if shop.splits else 1
        self.most_begun[p] = max(self.most_begun[p], begun * shop.again[k])
        self.order[p] = (*self.order[p], (kind, k))
        self.work_left[p] -= shop.work_of(kind, k)
        self.left -= 1

    def eligible(self) -> list[tuple[int, int]]:
        """Returns the passes that are allowed next."""
        stages = range(len(self.shop.placement))
        return [
            (kind, k)
            for kind in range(len(self.shop.kinds))
            for k in stages
            if self.allows(kind, k)
        ]

    def bound(self) -> float:
        """Returns seconds that no way to go on ends before."""
        if not self.left:
            return self.end
        tails = self.shop.tails
        return max(
            self.end,
            *(
                self.free[p] + left + tails[p]
                for p, left in enumerate(self.work_left)
                if left > _TOLERANCE
            ),
        )

    def branches(self) -> list[_Run]:
        """Returns the ways to go on, one of which leads to a best schedule."""
        shop, passes = self.shop, self.eligible()
        if not passes:
            return []
        # The pass that can end first: its device runs it, or what starts before then.
        ends = {x: self.end_of(*x) for x in passes}
        first = min(passes, key=lambda x: (ends[x], x))
        p = shop.placement[first[1]]
        found = []
        for kind, k in passes:
            if (
                shop.placement[k] == p
                and self.start(kind, k) < ends[first] + _TOLERANCE
            ):
                run = self.copy()
                run.append(kind, k)
                found.append(run)
        forwards = [k for kind, k in passes if kind == _F and shop.placement[k] == p]
        if shop.is_limited[p] and forwards and any(map(self.in_flight, shop.stages[p])):
            run = self.copy()
            run.waits[p] = True
            found.append(run)
        return found
