"""DualPipeV: forwards of one direction beside backwards of the other."""

from __future__ import annotations

import collections
import dataclasses

from tfgpipe.schedules.folded import Folded
from tfgpipe.schedules.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    ActionKind,
)
from tfgpipe.schedules.policy import Orders
from tfgpipe.schedules.schedule import Action


@dataclasses.dataclass(frozen=True)
class DualPipeV(Folded):
    """DualPipeV: stages fold back; in the steady state each forward has a backward.

    DeepSeek 2025 (github.com/deepseek-ai/DualPipe), half of DualPipe (DeepSeek-V3
    Technical Report, section 3.2.1), cut by Qi et al. A forward comes right before a
    backward of the other stage, so that one can compute while the other communicates;
    here they run one after the other. Backwards are split at the start and at the end
    alone. Where forwards and the halves of backwards take f, b and w, a step has a
    bubble of (P - 1) (f + b - w), unless w is longer than f or b. DeepSeek's, of pairs
    that send nothing before their end, is (P - 1) (f + 2 b - w) if pairs gain nothing
    by overlap. A device holds at most 2 P + 1 microbatches of one stage. Fewer than
    2 P microbatches are the first of 2 P. For K=4 stages on P=2 devices, M=4:

        device 0  F0a F1a F2a F0b B0b W0b F1b F3a B1b F2b B0a B2b F3b B1a B3b B2a W2a B3a W3a
        device 1  ... F0a F0b F1a F1b F2a B0b F2b B0a F3a B1b F3b B1a B2b B2a B3b B3a W3b W3a

    """  # noqa: E501

    name = "dualpipe_v"

    def folded_orders(self, num_microbatches: int, num_devices: int) -> Orders:
        """Returns for each device the actions of its two stages in order."""
        M, P = num_microbatches, num_devices
        orders = (_order(p, max(M, 2 * P), P) for p in range(P))
        return tuple(
            tuple(action for action in order if action.microbatch < M)
            for order in orders
        )


def _order(p: int, M: int, P: int) -> tuple[Action, ...]:
    """Returns the actions of device p, in the eight steps of DeepSeek's code."""
    order: list[Action] = []
    counts: collections.Counter[tuple[bool, int]] = collections.Counter()
    weights: collections.deque[Action] = collections.deque()
    down, up = p, 2 * P - 1 - p

    def run(kind: ActionKind, k: int) -> None:
        order.append(Action(kind, k, counts[kind.is_backward, k]))
        counts[kind.is_backward, k] += 1
        if kind == BACKWARD_INPUT:
            weights.append(order[-1].of(BACKWARD_WEIGHT))

    for _ in range(2 * (P - 1 - p)):
        run(FORWARD, down)
    for _ in range(p + 1):
        run(FORWARD, down)
        run(FORWARD, up)
    for _ in range(P - 1 - p):
        run(BACKWARD_INPUT, up)
        order.append(weights.popleft())
        run(FORWARD, up)
    for _ in range(M - 2 * P + p + 1):
        run(FORWARD, down)
        run(BACKWARD, up)
        run(FORWARD, up)
        run(BACKWARD, down)
    for _ in range(P - 1 - p):
        run(BACKWARD, up)
        run(FORWARD, up)
        run(BACKWARD, down)
    # From half of these on, the gradients of weights wait.
    for i in range(2 * (p + 1)):
        run(BACKWARD if i < p + 1 else BACKWARD_INPUT, down if i % 2 else up)
    for _ in range(P - 1 - p):
        order.append(weights.popleft())
        run(BACKWARD_INPUT, down)
    return (*order, *weights)
