"""1F1B: a forward and a backward in turn."""

from __future__ import annotations

import dataclasses

from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.kinds import BACKWARD, FORWARD
from tfgpipe.schedules.policy import Orders, SchedulePolicy, alternate, passes


@dataclasses.dataclass(frozen=True)
class OneFOneB(SchedulePolicy):
    """1F1B: as many forwards as it takes, then a backward after each.

    PipeDream-flush (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN
    Training", section 2.2; Megatron-LM, Narayanan et al. 2021, section 2.2.1). The
    bubble is GPipe's, but a stage never holds more microbatches than there are stages
    on the way from it to the end: K - k on a line. For K=4, M=8, one stage a device:

        stage 0  F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 F6 B3 F7 B4 .. B5 .. B6 .. B7
        stage 1  .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .. B6 .. B7 ..
        stage 2  .. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .. B7 .. ..
        stage 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .. .. ..

    """

    name = "1f1b"

    def num_warmup(self, height: int) -> int:
        """Returns the number of forwards before the first backward.

        Args:
            height: Number of stages on the longest way to the end, the own included.
        """
        return height

    def orders(self, flow: DataFlow, num_microbatches: int, num_devices: int) -> Orders:
        """Returns for each device its actions in order."""
        del num_devices  # One a stage.
        M = num_microbatches
        return tuple(
            alternate(
                passes(FORWARD, [k], M),
                passes(BACKWARD, [k], M),
                num_warmup=self.num_warmup(height),
            )
            for k, height in enumerate(flow.heights)
        )

    def in_flight(
        self, num_stages: int, num_microbatches: int, num_devices: int
    ) -> tuple[int, ...]:
        """Returns the forwards of the warm-up of stage k, at most M."""
        del num_devices
        K, M = num_stages, num_microbatches
        return tuple(min(self.num_warmup(K - k), M) for k in range(K))
