"""The order in which devices run the forward and backward actions of a mini-batch.

A *schedule* is a plain value: for each device, the ordered list of its actions. An
action is the forward or the backward of one stage `k` on one microbatch `m`. Nothing
here computes anything; `pipeline` turns a schedule into TensorFlow operations.

GPipe (Huang et al. 2019, section 2.3) fills the pipeline with all forwards, waits for
the loss of the whole mini-batch, then drains it backwards, the last microbatch first.
With `F` forward, `B` backward and one column a time slot, K=3 stages and M=4
microbatches look like this:

    stage 0  F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0
    stage 1  .. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..
    stage 2  .. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..

The dots are the *bubble*: (K - 1) / (M + K - 1) of each device's time.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True, order=True)
class Action:
    """One program run: the forward or backward of a stage on a microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The ordered actions of every device.

    Attributes:
        num_stages: K, the number of stages.
        num_microbatches: M, the number of microbatches in a mini-batch.
        orders: For each device, its actions in the order it runs them.
    """

    num_stages: int
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """Returns the actions whose results `action` needs."""
        k, m = action.stage, action.microbatch
        if action.kind == "forward":
            return (Action("forward", k - 1, m),) if k > 0 else ()
        if k + 1 < self.num_stages:
            return (Action("forward", k, m), Action("backward", k + 1, m))
        return (Action("forward", k, m),)

    def slots(self) -> dict[Action, int]:
        """Returns the time slot of every action, each taking one slot.

        An action starts as soon as its device is free and its dependencies are done.
        The keys come in an order in which dependencies precede their dependents, so
        iterating over the result is also an order in which to emit the actions.

        Raises:
            ValueError: If some action waits for one that never runs (a deadlock).
        """
        slots: dict[Action, int] = {}
        heads = [0] * len(self.orders)
        slot = 0
        while any(head < len(o) for head, o in zip(heads, self.orders, strict=True)):
            ready = [
                order[head]
                for head, order in zip(heads, self.orders, strict=True)
                if head < len(order)
                and all(
                    slots.get(d, slot) < slot for d in self.dependencies(order[head])
                )
            ]
            if not ready and slot > max(slots.values(), default=-1):
                waiting = [
                    o[h] for h, o in zip(heads, self.orders, strict=True) if h < len(o)
                ]
                raise ValueError(
                    f"The schedule deadlocks: {waiting[0].kind} of stage "
                    f"{waiting[0].stage}, microbatch {waiting[0].microbatch} waits for "
                    "an action that no device runs before it."
                )
            for device, order in enumerate(self.orders):
                if heads[device] < len(order) and order[heads[device]] in ready:
                    slots[order[heads[device]]] = slot
                    heads[device] += 1
            slot += 1
        return slots

    def actions(self, kind: Kind) -> tuple[Action, ...]:
        """Returns all actions of `kind`, dependencies first."""
        return tuple(action for action in self.slots() if action.kind == kind)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns GPipe's fill-drain schedule (Huang et al. 2019, figure 2c).

    >>> print(draw(gpipe(2, 2)))
    stage 0  F0 F1 .. .. B1 B0
    stage 1  .. F0 F1 B1 B0 ..
    """
    orders = tuple(
        tuple(Action("forward", k, m) for m in range(num_microbatches))
        + tuple(Action("backward", k, m) for m in reversed(range(num_microbatches)))
        for k in range(num_stages)
    )
    return Schedule(num_stages, num_microbatches, orders)


def draw(schedule: Schedule) -> str:
    """Draws a schedule as text: devices down, time slots across, idle as dots."""
    slots = schedule.slots()
    num_slots = max(slots.values(), default=-1) + 1
    width = max((len(str(action)) for action in slots), default=2)
    lines = []
    for device, order in enumerate(schedule.orders):
        row = {slots[action]: str(action) for action in order}
        cells = [row.get(s, "." * width).ljust(width) for s in range(num_slots)]
        lines.append(f"stage {device}  " + " ".join(cells))
    return "\n".join(lines)
