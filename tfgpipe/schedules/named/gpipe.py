"""GPipe's fill-drain schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.kinds import BACKWARD, FORWARD
from tfgpipe.schedules.policy import Orders, SchedulePolicy, passes
from tfgpipe.schedules.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class GPipe(SchedulePolicy):
    """GPipe's fill-drain schedule (Huang et al. 2019, figure 2c).

    All forwards, then all backwards, the last microbatch first. Stages may be on any
    device. For K=4, M=8:

        stage 0  F0 F1 F2 F3 F4 F5 F6 F7 .. .. .. .. .. .. B7 B6 B5 B4 B3 B2 B1 B0
        stage 1  .. F0 F1 F2 F3 F4 F5 F6 F7 .. .. .. .. B7 B6 B5 B4 B3 B2 B1 B0 ..
        stage 2  .. .. F0 F1 F2 F3 F4 F5 F6 F7 .. .. B7 B6 B5 B4 B3 B2 B1 B0 .. ..
        stage 3  .. .. .. F0 F1 F2 F3 F4 F5 F6 F7 B7 B6 B5 B4 B3 B2 B1 B0 .. .. ..
    """

    name = "gpipe"
    shares_devices = True

    def orders(self, flow: DataFlow, num_microbatches: int, num_devices: int) -> Orders:
        """Returns for each device its actions in order."""
        K, M, P = flow.num_stages, num_microbatches, num_devices
        return tuple(
            (
                *passes(FORWARD, range(p, K, P), M),
                *reversed(passes(BACKWARD, range(p, K, P), M)),
            )
            for p in range(P)
        )

    def min_microbatches(self, depth: int) -> int:
        """Returns 1: any number will do."""
        del depth
        return 1

    def on(
        self,
        placement: Sequence[int],
        num_microbatches: int,
        flow: DataFlow | None = None,
    ) -> Schedule:
        """Returns the schedule with stage k on device `placement[k]`, whichever."""
        schedule = self(len(placement), num_microbatches, flow=flow)
        return schedule.with_placement(placement)

    def in_flight(
        self, num_stages: int, num_microbatches: int, num_devices: int
    ) -> tuple[int, ...]:
        """Returns M for each stage."""
        del num_devices
        return (num_microbatches,) * num_stages
