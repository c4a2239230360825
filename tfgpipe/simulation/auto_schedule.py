"""`schedule="auto"`: the best order that a search finds for the costs of the stages."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tfgpipe import schedules
from tfgpipe._util import argument_checks
from tfgpipe.schedules import Action, DataFlow, Schedule, SchedulePolicy
from tfgpipe.simulation.search import best_schedule
from tfgpipe.simulation.simulator import Costs

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AutoSchedule(SchedulePolicy):
    """The order with the least step that `tfgpipe.best_schedule` finds.

    It is for the stages that a model has, by their FLOPs and with transfers that are
    free; that of `tfgpipe.plan(..., balance="time")` is for measured seconds. By these
    costs it is never worse than a named schedule. For the costs of a measured timeline,
    as `tfgpipe.simulation.costs_of` returns them, name them.

    >>> costs = tfgpipe.Costs(forward=[1, 1, 3], backward=[2, 2, 6])
    >>> tfgpipe.simulation.AutoSchedule(costs)(3, 6).name
    'auto'

    Attributes:
        costs: Costs of the stages, or None for those of the model or plan.
        memory_limit: Bytes of a device, or of each, for what is in `costs`; None for no
            limit.
    """

    name = "auto"
    shares_devices = True
    splits_backwards = True
    is_periodic = False

    costs: Costs | None = None
    memory_limit: argument_checks.MemoryLimit = None

    def __post_init__(self) -> None:
        limit = argument_checks.check_memory_limit(self.memory_limit)
        object.__setattr__(self, "memory_limit", limit)  # It has a hash.
        if self.costs is not None:
            argument_checks.check_instance("costs", self.costs, Costs)

    def fitted(
        self, costs: Callable[[], Costs], memory_limit: argument_checks.MemoryLimit
    ) -> AutoSchedule:
        """Returns the policy for the stages that there are, unless it has costs.

        Args:
            costs: Returns the costs of the stages.
            memory_limit: Bytes of a device, or of each, or None.
        """
        if self.costs is not None:
            return self
        return AutoSchedule(costs(), memory_limit)

    def min_microbatches(self, depth: int) -> int:
        """Returns 1: any number will do."""
        del depth
        return 1

    def orders(
        self, flow: DataFlow, num_microbatches: int, num_devices: int
    ) -> tuple[tuple[Action, ...], ...]:
        """Returns for each device its actions in order."""
        placement = self.deal(flow.num_stages, num_devices)
        return self.on(placement, num_microbatches, flow).orders

    def on(
        self,
        placement: Sequence[int],
        num_microbatches: int,
        flow: DataFlow | None = None,
    ) -> Schedule:
        """Returns the schedule with stage k on device `placement[k]`, however dealt.

        Args:
            placement: For each stage, the index of its device.
            num_microbatches: M.
            flow: The data flow between the stages. Defaults to a line.

        Raises:
            ValueError: If no schedule found stays within the limit.
        """
        found = _find(self, tuple(placement), num_microbatches, flow)
        return dataclasses.replace(found, name=self.name)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AutoSchedule:
        """Makes a policy from what `get_config` returned."""
        costs = config["costs"]
        return cls(**{**config, "costs": costs and Costs(**costs)})


@functools.lru_cache(maxsize=16)
def _find(
    policy: AutoSchedule,
    placement: tuple[int, ...],
    num_microbatches: int,
    flow: DataFlow | None,
) -> Schedule:
    """Returns the schedule that is found, or without costs one that holds little."""
    find = functools.partial(best_schedule, flow=flow)
    if policy.costs is None:
        lean = find(
            Costs(), placement, num_microbatches, splits_backwards=False, effort=0
        )
        return lean.schedule
    found = find(
        policy.costs, placement, num_microbatches, memory_limit=policy.memory_limit
    )
    _log.info(
        "Schedule for %d stages on %d devices, M=%d: %s; %s.",
        *(len(placement), found.schedule.num_devices, num_microbatches),
        *(found.schedule.name, found.verdict),
    )
    return found.schedule


# The name of a schedule, or of the search for one.
ScheduleName = Literal[schedules.Name, "auto"]
_POLICIES = {policy.name: policy for policy in (AutoSchedule(),)}


def find_schedule(schedule: Any) -> SchedulePolicy | Schedule:
    """Returns the policy of a name, or the policy or schedule itself.

    >>> tfgpipe.simulation.find_schedule("auto").costs is None
    True

    Args:
        schedule: One of `tfgpipe.schedules.NAMES`, `"auto"`, a policy, or a schedule.

    Raises:
        TypeError: If it is of another type.
        ValueError: If there is none of this name.
    """
    found: SchedulePolicy | Schedule = schedules.find(schedule, others=_POLICIES)
    return found
