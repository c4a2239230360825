"""Interleaved ZB-H1: several stages on each device, backwards in two halves."""

from __future__ import annotations

import dataclasses

from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.filling import fill
from tfgpipe.schedules.kinds import BACKWARD_INPUT
from tfgpipe.schedules.named.interleaved import interleave
from tfgpipe.schedules.named.zero_bubble import ZeroBubble
from tfgpipe.schedules.policy import Orders, SchedulePolicy


@dataclasses.dataclass(frozen=True)
class InterleavedZB(SchedulePolicy):
    """Interleaved 1F1B that fills the bubble with gradients of weights.

    The combination of Narayanan et al. 2021 (section 2.2.2) and Qi et al. 2024 (section
    2.1), as in `torch.distributed.pipelining`. If F, B and W of a stage take equally
    long, the bubble is (P - 1) / (3 v M + P - 1) for multiples of P. A device holds at
    most v P microbatches of one stage, what it holds of P in 1F1B. M is at least P. For
    K=4 stages on P=2 devices, M=4:

        device 0  F0a F1a F0b F1b ... B0b W0b F2a B1b W1b F3a B0a W0a F2b B1a W1a F3b B2b W2b B3b B2a B3a W3b W2a W3a
        device 1  ... F0a F1a F0b B0b F1b B1b W0b F2a B0a W1b F3a B1a W0a F2b B2b W1a F3b B3b B2a B3a W2b W3b W2a W3a

    """  # noqa: E501

    name = "interleaved_zb"
    shares_devices = True
    stages_per_device = (2, 4)
    splits_backwards = True

    def orders(self, flow: DataFlow, num_microbatches: int, num_devices: int) -> Orders:
        """Returns for each device its actions in order."""
        K, M, P = flow.num_stages, num_microbatches, num_devices
        if K == P:
            return ZeroBubble().orders(flow, M, P)
        orders = tuple(
            interleave(range(p, K, P), M, P, BACKWARD_INPUT, num_warmup=K - p)
            for p in range(P)
        )
        return fill(orders, DataFlow.line(K), [K] * P)
