"""Offload: microbatches that wait for their backward in the memory of the host."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tfgpipe._util import argument_checks
from tfgpipe.schedules.insertion import InsertionPolicy
from tfgpipe.schedules.kinds import OFFLOAD, RELOAD
from tfgpipe.schedules.schedule import Action, Schedule

# A stage and a microbatch.
_Visit = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Offload(InsertionPolicy):
    """Another schedule, in which microbatches wait in the memory of the host.

    What a stage saves of a microbatch, by the policy of rematerialisation, leaves the
    device after the forward and comes back before the backward, while the device goes
    on (Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.1.2, where there are no
    stages). So a device holds few microbatches, however many are in flight, and the
    order of its passes stays. For `"1f1b+offload"`, K=4, M=6, device 0:

        1F1B     F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 .. B3 .. B4 .. B5
        offload  F0 F1 F2 O1 F3 .. .. B0 R1 O3 F4 B1 F5 O5 R3 B2 B3 R5 B4 B5

    `O` is where the device waits until a microbatch has left; the copy begins right
    after its forward. At `R` one begins to come back; its backward waits for it. Of
    those that can leave, the one leaves whose backward comes last (Belady 1966).

    >>> from tfgpipe.schedules import Offload, one_f_one_b
    >>> one_f_one_b(8, 16).in_flight, Offload(one_f_one_b)(8, 16).in_flight
    ((8, 7, 6, 5, 4, 3, 2, 1), (3, 3, 3, 3, 3, 3, 2, 1))

    Attributes:
        schedule: The policy of the passes.
        most_held: The number of microbatches that a device holds at most, where the
            order of passes allows it: those at work, and those on their way. Defaults
            to as many as fit in the device's memory, and where nothing limits it to
            `ahead` + 2.
        ahead: Passes of its device that a copy has time for before something waits.
        costs: The `tfgpipe.Costs` that the memory is counted by. Not to be given.
        memory_limit: Bytes of a device, or of each. Not to be given.
        suffix: The end of its names. Of the class.

    Raises:
        TypeError: If `schedule` is none.
        ValueError: If a number is less than 1.
    """

    has_copies = True
    suffix: ClassVar[str] = "+offload"

    most_held: int | None = None
    ahead: int = 1
    costs: Any = None
    memory_limit: argument_checks.MemoryLimit = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("most_held", "ahead"):
            value = getattr(self, name)
            if value is not None:
                argument_checks.check_count(name, value)

    def fitted(
        self, costs: Callable[[], Any], memory_limit: argument_checks.MemoryLimit
    ) -> InsertionPolicy:
        """Returns the policy for the stages that there are.

        Args:
            costs: Returns the costs of the stages.
            memory_limit: Bytes of a device, or of each, or None.
        """
        # The passes themselves need not fit.
        if self.most_held is not None or memory_limit is None:
            return super().fitted(costs, None)
        return dataclasses.replace(
            self,
            schedule=self.schedule.fitted(costs, None),
            costs=costs(),
            memory_limit=memory_limit,
        )

    def insert(self, schedule: Schedule) -> Schedule:
        """Returns a schedule with copies to the host and back between its passes.

        Args:
            schedule: The schedule.
        """
        orders = tuple(
            self._with_copies(schedule, p) for p in range(schedule.num_devices)
        )
        return dataclasses.replace(
            schedule, orders=orders, name=schedule.name + self.suffix
        )

    def _with_copies(self, schedule: Schedule, p: int) -> tuple[Action, ...]:
        """Returns the order of device p, with copies."""
        order, ahead = schedule.orders[p], self.ahead
        if self.costs is None:
            return _insert_copies(order, self.most_held or ahead + 2, ahead)
        stages = range(schedule.num_stages)
        sizes = [self.costs.bytes_of("kept_bytes", k) for k in stages]
        free = _free_bytes(self.costs, self.memory_limit, schedule, p)

        def most_held(order: tuple[Action, ...], sizes: Sequence[float]) -> float:
            return dataclasses.replace(schedule, orders=(order,)).most_held(sizes)[0]

        def is_too_much(most: int) -> bool:
            return most_held(_insert_copies(order, most, ahead), sizes) > free

        # The more stay, the less is copied.
        in_flight = int(most_held(order, [1 for _ in stages]))
        numbers = range(ahead + 2, max(ahead + 2, in_flight) + 1)
        most = bisect.bisect_left(numbers, True, key=is_too_much) - 1
        return _insert_copies(order, numbers[max(most, 0)], ahead)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make it of the one that its name finds."""
        return {"most_held": self.most_held, "ahead": self.ahead}


def _free_bytes(costs: Any, memory_limit: Any, schedule: Schedule, p: int) -> float:
    """Returns the bytes that device p has for microbatches in flight."""
    limits = argument_checks.of_each_device(
        "memory_limit", memory_limit, schedule.num_devices, math.inf
    )
    mine = [k for k, q in enumerate(schedule.placement) if q == p]
    fixed = sum(costs.bytes_of("fixed_bytes", k) for k in mine)
    again = max(
        schedule.in_backward[k] * costs.bytes_of("backward_bytes", k) for k in mine
    )
    return float(limits[p] - fixed - again)


def _insert_copies(
    order: Sequence[Action], most_held: int, ahead: int
) -> tuple[Action, ...]:
    """Returns the order of a device, with copies of microbatches in flight.

    Args:
        order: Its passes.
        most_held: The number of microbatches that it is to hold at most.
        ahead: Passes between a copy's begin and what waits for it.
    """
    used: dict[_Visit, int] = {}  # Where the backward begins.
    for i, action in enumerate(order):
        if action.kind.is_backward:
            used.setdefault((action.stage, action.microbatch), i)
    since: dict[_Visit, int] = {}  # Those on the device, and where they came to it.
    away: list[_Visit] = []
    result: list[Action] = []

    def evict(i: int) -> None:
        """Has others leave before place i, until one more can be held."""
        while len(since) >= most_held:
            can_leave = [x for x in since if used[x] > i + ahead + 1]
            # One that has just come would hold the device up.
            rested = [x for x in can_leave if since[x] < i - ahead] or can_leave
            if not rested:
                return
            leaves = max(rested, key=used.__getitem__)
            del since[leaves]
            away.append(leaves)
            result.append(Action(OFFLOAD, *leaves))

    for i, action in enumerate(order):
        for visit in [x for x in away if used[x] <= i + ahead]:
            evict(i)
            away.remove(visit)
            since[visit] = i
            result.append(Action(RELOAD, *visit))
        visit = action.stage, action.microbatch
        if action.kind.in_flight > 0:
            evict(i)
            since[visit] = i
        result.append(action)
        if action.kind.in_flight < 0:
            del since[visit]
    return tuple(result)
