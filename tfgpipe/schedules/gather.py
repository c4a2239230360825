"""Gather: weights in slices that are whole for some passes at a time."""

from __future__ import annotations

import collections
import dataclasses
from typing import ClassVar

from tfgpipe._util import argument_checks
from tfgpipe.schedules.insertion import InsertionPolicy
from tfgpipe.schedules.kinds import GATHERS
from tfgpipe.schedules.schedule import Action, Schedule


@dataclasses.dataclass(frozen=True)
class Gather(InsertionPolicy):
    """Another schedule, before whose passes weights in slices are gathered.

    With `shard_replicas="weights"` a replica has a slice of each large weight. Without
    this policy the weights of all stages are gathered once, as a step begins, and held
    to its end. With it those of a stage are gathered each time that its device comes
    to it, while the device works on another stage, and freed when it has left. So it
    is for schedules of several stages on a device (Lamy-Poirier 2023, "Breadth-First
    Pipeline Parallelism", section 4.2). For `"looped_bfs+gather"`, K=4, M=2, on two
    devices, device 0, whose stages are a and b:

        looped BFS  F0a F1a F0b F1b .. .. B1b B0b B1a B0a
        gather      G0a F0a G0b F1a F0b F1b .. .. B1b G1a B0b B1a B0a

    The pass of the same stage and microbatch waits for a gather. As B1b follows F1b,
    nothing is gathered between.

    >>> from tfgpipe.schedules import Gather, find
    >>> plan = Gather(find("looped_bfs"))(4, 2, num_devices=2)
    >>> print(" ".join(plan.labels[action] for action in plan.orders[1]))
    G0a F0a G0b F1a F0b F1b B1b G1a B0b B1a B0a

    Attributes:
        schedule: The policy of the passes.
        ahead: Passes of its device that a gather has time for before a pass waits.
        every_pass: True to gather before each pass. False for once as long as a device
            stays with a stage.
        suffix: The end of its names. Of the class.

    Raises:
        TypeError: If `schedule` is none.
        ValueError: If `ahead` is less than 1.
    """

    suffix: ClassVar[str] = "+gather"

    ahead: int = 1
    every_pass: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        argument_checks.check_count("ahead", self.ahead)

    def insert(self, schedule: Schedule) -> Schedule:
        """Returns a schedule with gathers between its passes.

        Args:
            schedule: The schedule.
        """
        orders = tuple(map(self._with_gathers, schedule.orders))
        return dataclasses.replace(
            schedule, orders=orders, name=schedule.name + self.suffix
        )

    def _with_gathers(self, order: tuple[Action, ...]) -> tuple[Action, ...]:
        """Returns the order of a device, with gathers."""
        passes = [i for i, action in enumerate(order) if action.kind.is_pass]
        # By the place in the order before which they are inserted.
        gathers: dict[int, list[Action]] = collections.defaultdict(list)
        for rank, i in enumerate(passes):
            action = order[i]
            goes_on = rank > 0 and order[passes[rank - 1]].stage == action.stage
            if goes_on and not self.every_pass:
                continue
            place = passes[max(rank - self.ahead, 0)]
            gathers[place].append(action.of(GATHERS[action.kind]))
        return tuple(x for i, a in enumerate(order) for x in (*gathers[i], a))
