"""The job shop of a pipeline: devices, the passes of stages, their times and bytes.

Microbatches are alike, so each stage takes them in order, and what is left to decide is
which of its stages' passes a device runs next.

The bound of a device is the longer of two times: until its first backward can start,
less the forwards that it can run till then, and all else that it has to run; and that
in which as many microbatches as it has memory for are in flight, one after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tfgpipe.schedules import DataFlow, kinds
from tfgpipe.simulation.simulator import Costs

# Passes by number: of a whole backward there is no third.
FORWARD, BACKWARD, WEIGHT = range(3)
TOLERANCE = 1e-9

# Passes of a device in order, by kind and stage; those of each device.
Order: TypeAlias = tuple[tuple[int, int], ...]
Orders: TypeAlias = tuple[Order, ...]


class Shop:
    """Devices, the passes of stages, their times and bytes.

    Args:
        costs: The costs of actions and transfers.
        placement: For each stage the index of its device.
        num_microbatches: M.
        flow: The data flow between the stages.
        memory_limits: Bytes of each device.
        splits: True if backwards run in two halves.
    """

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
                sent = self.heads[j] + self.seconds[FORWARD][j] + self.delay(j, k)
                self.heads[k] = max(self.heads[k], sent)
                back = self.delay(k, j) + self.ways_back[j]
                self.ways_back[k] = max(self.ways_back[k], back)
            self.ways_back[k] += self.work_of(BACKWARD, k, recompute=False)
        self.tails = [self._tail(some) for some in self.stages]

    def work_of(self, kind: int, k: int, *, recompute: bool = True) -> float:
        """Returns the seconds that a pass keeps its device busy."""
        again = self.recompute[k] if kind == BACKWARD and recompute else 0.0
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

    @property
    def num_passes(self) -> int:
        """Number of passes of a step."""
        return len(self.placement) * self.M * len(self.kinds)

    def _bound_of(self, p: int) -> float:
        """Returns the bound of a device: see the module."""
        stages, M = self.stages[p], self.M
        forwards = M * sum(self.seconds[FORWARD][k] for k in stages)
        kept = [self.kept[k] for k in stages]
        in_flight = 0.0
        if self.is_limited[p] and any(kept):
            room = self.limits[p] - min(self.again[k] for k in stages)
            if len({*kept}) == 1:  # A whole number of microbatches.
                room = room // kept[0] * kept[0]
            longest = max(self.seconds[FORWARD][k] for k in stages)
            if min(kept):
                forwards = min(forwards, room // min(kept) * longest)
            held = sum(self.kept[k] * self._seconds_in_flight(k) for k in stages)
            in_flight = M * held / room if room > 0 else math.inf
        until = min(map(self._first_backward, stages))
        head = min(self.heads[k] for k in stages)
        rest = self.work[p] - forwards
        busy = max(head + self.work[p], until + rest)
        return max(busy, head + in_flight) + self.tails[p]

    def _seconds_in_flight(self, k: int) -> float:
        """Returns the seconds that a microbatch is in flight at a stage at least."""
        last = self.seconds[WEIGHT][k] if self.splits else 0.0
        back = self.work_of(BACKWARD, k, recompute=False)
        return self._first_backward(k) - self.heads[k] + back + last

    def _first_backward(self, k: int) -> float:
        """Returns the seconds until the first backward of a stage can start."""
        # From its forward to the end, and back.
        ways = [0.0] * len(self.placement)
        for j in reversed(range(k, len(ways))):
            for i in self.flow.targets[j]:
                way = self.delay(j, i) + ways[i] + self.delay(i, j)
                way += self.work_of(BACKWARD, i, recompute=False)
                ways[j] = max(ways[j], way)
            ways[j] += self.seconds[FORWARD][j]
        return self.heads[k] + ways[k]


class Run:
    """The passes that devices have run so far, each in its order.

    Attributes:
        left: Number of passes that are still to run.
        most: The most microbatches in flight of each device.
        end: Seconds until all that has run has ended.
    """

    def __init__(self, shop: Shop) -> None:
        K, P = len(shop.placement), shop.num_devices
        self.shop = shop
        self.done = [[0] * K for _ in shop.kinds]
        self.order: list[Order] = [()] * P
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
        self.left, self.end = shop.num_passes, 0.0

    def copy(self) -> Run:
        """Returns a copy that goes on by itself."""
        copy = object.__new__(Run)
        for name, value in vars(self).items():
            if isinstance(value, list):
                value = [list(x) if isinstance(x, list) else x for x in value]
            setattr(copy, name, dict(value) if isinstance(value, dict) else value)
        return copy

    @property
    def orders(self) -> Orders:
        """For each device its passes in order."""
        return tuple(self.order)

    def in_flight(self, k: int) -> int:
        """Returns the number of microbatches in flight at a stage."""
        return self.done[FORWARD][k] - self.done[-1][k]

    @property
    def is_planned_within_limits(self) -> bool:
        """True if a plan finds memory for this order: `StepLoad`'s law of memory."""
        needs = zip(self.held_at_most, self.most_begun, self.shop.limits, strict=True)
        return all(held + begun <= limit for held, begun, limit in needs)

    def allows(self, kind: int, k: int) -> bool:
        """Returns whether what a pass needs has been run, and its memory is there."""
        shop, m, p = self.shop, self.done[kind][k], self.shop.placement[k]
        if kind == FORWARD:
            if m == shop.M or self.waits[p]:
                return False
            if any(self.done[FORWARD][j] <= m for j in shop.flow.sources[k]):
                return False
            held = self.held[p] + shop.kept[k]
            # A backward of some stage has to fit in later.
            begun = [j for j in shop.stages[p] if j == k or self.in_flight(j)]
            again = max(self.begun[p], min(shop.again[j] for j in begun))
            return held + again <= shop.limits[p]
        if kind == WEIGHT:
            return m < self.done[BACKWARD][k]
        if m >= self.done[FORWARD][k]:
            return False
        if any(self.done[BACKWARD][j] <= m for j in shop.flow.targets[k]):
            return False
        return self.held[p] + self.begun[p] + shop.again[k] <= shop.limits[p]

    def start(self, kind: int, k: int) -> float:
        """Returns the seconds until a pass can start that is allowed."""
        return max(self.free[self.shop.placement[k]], self._ready(kind, k))

    def _ready(self, kind: int, k: int) -> float:
        """Returns the seconds until what it needs from others has arrived."""
        if kind == WEIGHT:
            return 0.0
        flow, m = self.shop.flow, self.done[kind][k]
        needed = flow.sources[k] if kind == FORWARD else flow.targets[k]
        return max((self.arrivals[kind, j, k][m] for j in needed), default=0.0)

    def end_of(self, kind: int, k: int) -> float:
        """Returns the seconds until a pass has ended that would be run now."""
        shop, p = self.shop, self.shop.placement[k]
        start = self.start(kind, k)
        if kind == BACKWARD and shop.recompute[k]:
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
        if kind == FORWARD:
            self.held[p] += shop.kept[k]
            self.flight[p] += 1
            if self.flight[p] > self.most[p]:
                self.most[p], self.held_at_most[p] = self.flight[p], self.held[p]
        else:
            self.waits[p] = False
        if kind == BACKWARD and shop.splits:
            self.begun[p] += shop.again[k]
        if kind == len(shop.kinds) - 1:
            self.held[p] -= shop.kept[k]
            self.flight[p] -= 1
            self.begun[p] -= shop.again[k] if shop.splits else 0.0
        self.done[kind][k] += 1
        begun = self.done[BACKWARD][k] - self.done[-1][k] if shop.splits else 1
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

    def finish(
        self, rank: Callable[[int, int, float], tuple[float, ...] | None]
    ) -> bool:
        """Runs the rest, of what is allowed that of the least rank first.

        Args:
            rank: Returns the rank of a pass, of its kind, stage and start. It depends
                on passes that this stage has run. None if it has to wait for others.

        Returns:
            Whether all has been run; else no pass is allowed.
        """
        shop = self.shop
        ranks: dict[tuple[int, int], tuple[float, ...]] = {}
        changed = {*range(len(shop.placement))}
        while self.left:
            for k in changed:
                for kind in range(len(shop.kinds)):
                    ranks.pop((kind, k), None)
                    if self.allows(kind, k):
                        found = rank(kind, k, self.start(kind, k))
                        if found is not None:
                            ranks[kind, k] = found
            if not ranks:
                return False
            kind, k = min(ranks, key=lambda x: (ranks[x], -x[1], x[0]))
            self.append(kind, k)
            near = shop.flow.sources[k], shop.flow.targets[k]
            changed = {*shop.stages[shop.placement[k]], *near[0], *near[1]}
        return True

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
                if left > TOLERANCE
            ),
        )

    def branches(self) -> list[Run]:
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
            if shop.placement[k] == p and self.start(kind, k) < ends[first] + TOLERANCE:
                run = self.copy()
                run.append(kind, k)
                found.append(run)
        forwards = [
            k for kind, k in passes if kind == FORWARD and shop.placement[k] == p
        ]
        if shop.is_limited[p] and forwards and any(map(self.in_flight, shop.stages[p])):
            run = self.copy()
            run.waits[p] = True
            found.append(run)
        return found
