"""Interleaved 1F1B: several stages on each device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfgpipe._util import argument_checks
from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.kinds import BACKWARD, FORWARD, ActionKind
from tfgpipe.schedules.named.one_f_one_b import OneFOneB
from tfgpipe.schedules.policy import Orders, SchedulePolicy, alternate
from tfgpipe.schedules.schedule import Action


@dataclasses.dataclass(frozen=True)
class Interleaved(SchedulePolicy):
    """1F1B over several stages a device, which divides the bubble by v.

    Megatron-LM (Narayanan et al. 2021, section 2.2.2). Device p runs the stages p,
    p + P, p + 2 P, ...: microbatches pass all devices v times, P of them at a time. M
    is at least P; multiples of P have the least bubble. For K=4 stages on P=2 devices,
    M=8:

        device 0  F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a F4a B2b F5a B3b F4b B2a F5b B3a F6a B4b F7a B5b F6b B4a F7b B5a ... B6b ... B7b B6a B7a
        device 1  ... F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b F4a B2a F5a B3a F4b B4b F5b B5b F6a B4a F7a B5a F6b B6b F7b B7b B6a B7a ...

    Where a transfer takes time, device 0 waits for P of them each time that the fill
    comes round to it, and so does the drain: 2 (P v - 1) transfers lengthen the step.
    With microbatches run ahead whose forwards take as long as P transfers, it is P
    fewer, as many as Qi et al. 2024 (table 5) count. With groups of 2 P it is 2 (P - 1)
    if 2 P divides M; a device then holds (v - 1) P microbatches more. Such a schedule
    is `dataclasses.replace(tfgpipe.schedules.interleaved, num_ahead=1)`.

    Attributes:
        num_ahead: Microbatches that each device runs, and holds, of its first stage
            before those of a group enter its second.
        group_size: Number of microbatches that pass one after the other, at least P.
            None for P.
    """  # noqa: E501

    name = "interleaved"
    shares_devices = True
    stages_per_device = (2, 4)

    num_ahead: int = 0
    group_size: int | None = None

    def __post_init__(self) -> None:
        argument_checks.check_count("num_ahead", self.num_ahead, least=0)
        if self.group_size is not None:
            argument_checks.check_count("group_size", self.group_size)

    def orders(self, flow: DataFlow, num_microbatches: int, num_devices: int) -> Orders:
        """Returns for each device its actions in order."""
        K, M, P = flow.num_stages, num_microbatches, num_devices
        if K == P:
            return OneFOneB().orders(flow, M, P)
        v, size = K // P, self.group_size or P
        if size < P:
            raise ValueError(
                "A group of microbatches fills all devices. Received "
                f"group_size={size} for {P} devices. Use {P}, or 2 * {P} to hide "
                "transfers."
            )
        return tuple(
            interleave(
                range(p, K, P),
                M,
                size,
                BACKWARD,
                num_warmup=2 * (P - 1 - p) + (v - 1) * size + 1,
                num_ahead=self.num_ahead,
            )
            for p in range(P)
        )

    def in_flight(
        self, num_stages: int, num_microbatches: int, num_devices: int
    ) -> tuple[int, ...]:
        """Returns `Schedule.in_flight` of the schedule on a line of stages."""
        # After as many groups as there are in flight, all repeats.
        M = min(num_microbatches, 4 * (self.group_size or num_devices) + self.num_ahead)
        return self(num_stages, M, num_devices=num_devices).in_flight


def interleave(
    stages: Sequence[int],
    M: int,
    group_size: int,
    backward: ActionKind,
    *,
    num_warmup: int,
    num_ahead: int = 0,
) -> tuple[Action, ...]:
    """Returns the forwards and backwards of a device, in groups of microbatches.

    Args:
        stages: The stages of the device.
        M: Number of microbatches.
        group_size: Number of microbatches that pass one after the other.
        backward: Kind of the backwards.
        num_warmup: Number of forwards before the first backward, if none is ahead.
        num_ahead: Number of microbatches of the first stage ahead of its group.
    """
    # Full groups, of which the last may hold microbatches that there are not. Without
    # these a small last group would deadlock.
    groups = [range(start, start + group_size) for start in range(0, M, group_size)]
    firsts = [
        range(g.start + num_ahead * (g.start > 0), g.stop + num_ahead) for g in groups
    ]
    order = alternate(
        [
            Action(FORWARD, k, m)
            for group, first in zip(groups, firsts, strict=True)
            for k in stages
            for m in (first if k == stages[0] else group)
        ],
        [Action(backward, k, m) for g in groups for k in stages[::-1] for m in g],
        num_warmup=num_warmup + num_ahead,
    )
    return tuple(action for action in order if action.microbatch < M)
