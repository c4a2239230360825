"""Schedules from building blocks: the passes of one microbatch, repeated and filled.

A *building block* gives the time slot of each pass of microbatch 0; microbatch m has
the same slots 6 m later, so that no two passes meet (Qi et al. 2024, "Pipeline
Parallelism with Controllable Memory", section 3). Only their order is kept: devices run
what they can at once, and gradients of weights, which no other pass waits for, when
they would wait.

In a *folded* placement the stages run down the devices and up again, so that device 0
has the first and the last one:

    device 0   stage 0   stage 7
    device 1   stage 1   stage 6
    device 2   stage 2   stage 5
    device 3   stage 3   stage 4
"""

from __future__ import annotations

import abc
from typing import ClassVar

from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.filling import fill
from tfgpipe.schedules.kinds import BACKWARD_INPUT, FORWARD
from tfgpipe.schedules.named.zero_bubble import ZeroBubble
from tfgpipe.schedules.policy import Orders, SchedulePolicy
from tfgpipe.schedules.schedule import Action

# Slots of a microbatch on a device: three passes of each of its two stages.
_PERIOD = 6


class Folded(SchedulePolicy):
    """Two stages on each device: k and K - 1 - k, the first and the last together.

    With one stage on each device it is ZB-H1.
    """

    shares_devices = True
    stages_per_device = (2,)
    splits_backwards = True

    def orders(self, flow: DataFlow, num_microbatches: int, num_devices: int) -> Orders:
        """Returns for each device its actions in order."""
        K, P = flow.num_stages, num_devices
        if K == P:
            return ZeroBubble().orders(flow, num_microbatches, P)
        if K != 2 * P:
            raise ValueError(
                f"Schedule '{self.name}' has two stages on each device, of which the "
                f"last comes back to the first. Received {K} stages for {P} devices. "
                + (
                    f"Use num_stages={K - 1} or {K + 1}."
                    if K % 2
                    else f"Use num_stages={2 * P}, or name {K // 2} `devices`."
                )
            )
        return self.folded_orders(num_microbatches, P)

    @abc.abstractmethod
    def folded_orders(self, num_microbatches: int, num_devices: int) -> Orders:
        """Returns for each device the actions of its two stages in order.

        Args:
            num_microbatches: M.
            num_devices: P. There are 2 P stages.
        """

    def min_microbatches(self, depth: int) -> int:
        """Returns 1: any number will do."""
        del depth
        return 1

    def deal(self, num_stages: int, num_devices: int) -> tuple[int, ...]:
        """Returns the index of each stage's device, down the devices and up again."""
        if num_stages == num_devices:
            return tuple(range(num_stages))
        return tuple(min(k, num_stages - 1 - k) for k in range(num_stages))


class VShape(Folded):
    """A folded schedule by a building block (Qi et al. 2024, section 3.2).

    The forward of a stage comes `down` slots after that of the stage before, on the way
    down the devices, and one slot after it on the way up. So do input gradients, which
    come down the devices through the later stages and go up through the earlier ones.
    A microbatch is held longer, the slower it comes down.

    Attributes:
        down: Slots between passes of one device and the next. Of the class.
    """

    down: ClassVar[int]

    @abc.abstractmethod
    def turns(self, num_devices: int) -> tuple[int, int, int]:
        """Returns the slots until a microbatch goes on from where it turns.

        That is on the last device, on the first one, at its loss, and on the last one
        again. With these no two passes of a device fall on one slot of a period.

        Args:
            num_devices: P.
        """

    @abc.abstractmethod
    def most_held(self, num_devices: int) -> int:
        """Returns the most microbatches in flight on a device, each half its stages.

        Args:
            num_devices: P.
        """

    def folded_orders(self, num_microbatches: int, num_devices: int) -> Orders:
        """Returns for each device the actions of its two stages in order."""
        M, P = num_microbatches, num_devices
        K, last = 2 * P, P - 1
        at_last, at_loss, at_last_again = self.turns(P)
        there = self.down * last + at_last  # The slot of stage P.
        loss = there + last + at_loss
        back = loss + self.down * last + at_last_again

        def order(p: int) -> tuple[Action, ...]:
            first = (
                (self.down * p, FORWARD, p),
                (there + last - p, FORWARD, K - 1 - p),
                (loss + self.down * p, BACKWARD_INPUT, K - 1 - p),
                (back + last - p, BACKWARD_INPUT, p),
            )
            passes = (
                (slot + _PERIOD * m, Action(kind, k, m))
                for slot, kind, k in first
                for m in range(M)
            )
            return tuple(action for _, action in sorted(passes))

        return fill(
            tuple(order(p) for p in range(P)),
            DataFlow.line(K),
            [2 * self.most_held(P)] * P,
        )
