"""Policies that insert actions between the passes of another policy's schedules."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tfgpipe._util import argument_checks
from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.policy import Orders, SchedulePolicy
from tfgpipe.schedules.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class InsertionPolicy(SchedulePolicy):
    """Another policy's schedules, with actions between their passes.

    Its names are those of the other with a suffix: `"1f1b+offload"`.

    Attributes:
        schedule: The policy of the passes.
        suffix: The end of its names. Of the class.
    """

    suffix: ClassVar[str]

    schedule: SchedulePolicy

    def __post_init__(self) -> None:
        base = self.schedule
        hint = ' Find it by its name: `tfgpipe.schedules.find("zbv")`.'
        argument_checks.check_instance("schedule", base, SchedulePolicy, hint=hint)
        vars(self).update(
            name=base.name + self.suffix,
            shares_devices=base.shares_devices,
            stages_per_device=base.stages_per_device,
            splits_backwards=base.splits_backwards,
            is_periodic=base.is_periodic,
        )

    @abc.abstractmethod
    def insert(self, schedule: Schedule) -> Schedule:
        """Returns a schedule with this policy's actions between its passes.

        Args:
            schedule: The schedule.
        """

    def min_microbatches(self, depth: int) -> int:
        """Returns the fewest microbatches of the schedule of the passes."""
        return self.schedule.min_microbatches(depth)

    def deal(self, num_stages: int, num_devices: int) -> tuple[int, ...]:
        """Returns the index of each stage's device, as the schedule of the passes."""
        return self.schedule.deal(num_stages, num_devices)

    def orders(self, flow: DataFlow, num_microbatches: int, num_devices: int) -> Orders:
        """Returns for each device its actions in order."""
        K, P = flow.num_stages, num_devices
        plain = self.schedule(K, num_microbatches, num_devices=P, flow=flow)
        return self.insert(plain).orders

    def on(
        self,
        placement: Sequence[int],
        num_microbatches: int,
        flow: DataFlow | None = None,
    ) -> Schedule:
        """Returns the schedule with stage k on device `placement[k]`."""
        return self.insert(self.schedule.on(placement, num_microbatches, flow))

    def fitted(
        self, costs: Callable[[], Any], memory_limit: argument_checks.MemoryLimit
    ) -> InsertionPolicy:
        """Returns the policy for the stages that there are.

        Args:
            costs: Returns the costs of the stages.
            memory_limit: Bytes of a device, or of each, or None.
        """
        base = self.schedule.fitted(costs, memory_limit)
        same = base is self.schedule
        return self if same else dataclasses.replace(self, schedule=base)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make it of the one that its name finds."""
        values = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        del values["schedule"]
        return values

    def with_config(self, config: dict[str, Any]) -> InsertionPolicy:
        """Returns the same schedule with what `get_config` returned."""
        return dataclasses.replace(self, **config)
