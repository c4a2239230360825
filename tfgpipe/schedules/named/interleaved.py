"""Interleaved 1F1B: several stages on each device."""

from __future__ import annotations

import dataclasses

from tfgpipe._util import argument_checks
from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.kinds import BACKWARD, FORWARD
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

    The first of a group comes back to device 0 as the last of it has left, so that
    device 0 waits for each transfer of the way: 2 (v P - 1) transfers lengthen the
    step. Groups of 2 P are back in time, and leave 2 (P - 1), if 2 P divides M; devices
    then hold (v - 1) P microbatches more. Between are Megatron's groups of other sizes
    (`microbatch_group_size_per_vp_stage`).

    Attributes:
        group_size: Number of microbatches that pass one after the other, at least P.
            None for P.
    """  # noqa: E501

    name = "interleaved"
    shares_devices = True
    stages_per_device = (2, 4)

    group_size: int | None = None

    def __post_init__(self) -> None:
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
        # Full groups, of which the last may hold microbatches that there are not.
        # Without these a small last group would deadlock.
        groups = [range(start, start + size) for start in range(0, M, size)]

        def order(p: int) -> tuple[Action, ...]:
            mine = range(p, K, P)
            return alternate(
                [Action(FORWARD, k, m) for g in groups for k in mine for m in g],
                [Action(BACKWARD, k, m) for g in groups for k in mine[::-1] for m in g],
                num_warmup=2 * (P - 1 - p) + (v - 1) * size + 1,
            )

        return tuple(
            tuple(action for action in order(p) if action.microbatch < M)
            for p in range(P)
        )

    def in_flight(
        self, num_stages: int, num_microbatches: int, num_devices: int
    ) -> tuple[int, ...]:
        """Returns `Schedule.in_flight` of the schedule on a line of stages."""
        # After as many groups as there are in flight, all repeats.
        M = min(num_microbatches, 4 * (self.group_size or num_devices))
        return self(num_stages, M, num_devices=num_devices).in_flight
