"""ZB-H1: backwards in two halves, of which one fills the bubble."""

from __future__ import annotations

import dataclasses

from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.filling import fill
from tfgpipe.schedules.kinds import BACKWARD_INPUT, FORWARD
from tfgpipe.schedules.policy import Orders, SchedulePolicy, alternate, passes


@dataclasses.dataclass(frozen=True)
class ZeroBubble(SchedulePolicy):
    """ZB-H1: 1F1B that fills the bubble with gradients of weights.

    Qi et al. 2024 ("Zero Bubble Pipeline Parallelism", section 2.1). `B` computes the
    gradients of the inputs alone, which the stage before waits for; `W`, those of the
    weights, comes when there is time: k microbatches later on stage k, so that no
    stage holds more than K. Where F, B and W take f, b and w, each device waits for
    (K - 1) (f + b - min(f, b, w)): the paper's (K - 1) (f + b - w), unless w is longer
    than f or b. For K=4, M=8, one stage a device:

        stage 0  F0 F1 F2 F3 .. .. .. B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
        stage 1  .. F0 F1 F2 .. .. B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
        stage 2  .. .. F0 F1 .. B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
        stage 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7

    """  # noqa: E501

    name = "zero_bubble"
    splits_backwards = True

    def orders(self, flow: DataFlow, num_microbatches: int, num_devices: int) -> Orders:
        """Returns for each device its actions in order."""
        del num_devices  # One a stage.
        M = num_microbatches
        orders = (
            alternate(
                passes(FORWARD, [k], M),
                passes(BACKWARD_INPUT, [k], M),
                num_warmup=height,
            )
            for k, height in enumerate(flow.heights)
        )
        return fill(tuple(orders), flow, [flow.depth] * flow.num_stages)

    def in_flight(
        self, num_stages: int, num_microbatches: int, num_devices: int
    ) -> tuple[int, ...]:
        """Returns min(K, M) for each stage."""
        del num_devices
        return (min(num_stages, num_microbatches),) * num_stages
