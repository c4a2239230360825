"""The order in which devices run the actions of a mini-batch, as a plain value.

An *action* is one run of a stage function: the forward of a stage `k` on a microbatch
`m`, its backward, or one half of a split backward: input gradients, which the previous
stage waits for, or weight gradients, which no other stage needs. A *schedule* is, for
each device, the ordered list of its actions. Nothing here computes; `tfgpipe.runtime`
turns a schedule into TensorFlow operations, `tfgpipe.simulation` into times.

The dependencies of an action are the same in every schedule:

    F k-1, m ─▶ F k, m ─▶ F k+1, m        forward: of the stage before
                  │
                  ▼
    B k-1, m ◀─ B k, m ◀─ B k+1, m        backward: of the stage after
                  │
                  ▼
                W k, m                    gradients of weights, where B is split
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

ActionKind = Literal["forward", "backward", "backward_input", "backward_weight"]

_LETTERS: dict[ActionKind, str] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "B",
    "backward_weight": "W",
}


@dataclasses.dataclass(frozen=True, order=True)
class Action:
    """One run of a stage function on a microbatch.

    Attributes:
        kind: `"forward"`; `"backward"`, of inputs and weights; or one half of it,
            `"backward_input"` or `"backward_weight"`.
        stage: k, counted from the pipeline's input.
        microbatch: m.

    Example:

    >>> str(tfgpipe.Action("forward", 0, 3))
    'F3'
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.kind not in _LETTERS or self.stage < 0 or self.microbatch < 0:
            raise ValueError(
                f"An action has a kind of {', '.join(map(repr, _LETTERS))}, and a "
                "stage and a microbatch of at least 0. Received "
                f"Action({self.kind!r}, {self.stage}, {self.microbatch})."
            )

    def __str__(self) -> str:
        return f"{_LETTERS[self.kind]}{self.microbatch}"

    def describe(self) -> str:
        """Returns the action in words."""
        kind = self.kind.replace("_", " ")
        return f"{kind} of stage {self.stage}, microbatch {self.microbatch}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The ordered actions of every device.

    Attributes:
        num_stages: K, the number of stages, counting each of several on one device.
        num_microbatches: M, the number of microbatches in a mini-batch.
        orders: For each device, its actions in the order it runs them.
        name: What to call it.

    Example, of one device that runs two stages on one microbatch:

    >>> from tfgpipe.schedules import Action, Schedule, draw
    >>> order = (
    ...     Action("forward", 0, 0),
    ...     Action("forward", 1, 0),
    ...     Action("backward", 1, 0),
    ...     Action("backward", 0, 0),
    ... )
    >>> print(draw(Schedule(2, 1, (order,)).validate()))
    device 0  F0a F0b B0b B0a
    """

    num_stages: int
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    name: str = "custom"

    @property
    def num_devices(self) -> int:
        """P, the number of devices."""
        return len(self.orders)

    @functools.cached_property
    def placement(self) -> tuple[int, ...]:
        """For each stage, the index of its device."""
        devices = {a.stage: p for p, order in enumerate(self.orders) for a in order}
        return tuple(devices[k] for k in range(self.num_stages))

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """Returns the actions whose results an action needs."""
        k, m = action.stage, action.microbatch
        if action.kind == "forward":
            return (Action("forward", k - 1, m),) if k > 0 else ()
        if action.kind == "backward_weight":
            return (Action("backward_input", k, m),)
        own = Action("forward", k, m)
        if k + 1 == self.num_stages:
            return (own,)
        return (own, self._backward(k + 1, m)[0])

    def first_microbatches(self, num_microbatches: int) -> Schedule:
        """Returns the schedule without any but the first microbatches."""
        if num_microbatches >= self.num_microbatches:
            return self
        orders = (
            tuple(a for a in order if a.microbatch < num_microbatches)
            for order in self.orders
        )
        return Schedule(self.num_stages, num_microbatches, tuple(orders), self.name)

    def with_placement(self, placement: Sequence[int]) -> Schedule:
        """Returns the same actions with stage k on device `placement[k]`.

        Each device runs those of its stages in the order of their time slots, so a
        schedule that runs still does.
        """
        if tuple(placement) == self.placement:
            return self
        orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
        for action in self.slots:
            orders[placement[action.stage]].append(action)
        return dataclasses.replace(self, orders=tuple(map(tuple, orders)))

    @functools.cached_property
    def slots(self) -> Mapping[Action, int]:
        """The time slot of every action, each taking one slot.

        An action starts as soon as its device is free and its dependencies are done.
        The keys come in an order in which dependencies precede their dependents, so
        iterating over the result is also an order in which to emit the actions.

        Raises:
            ValueError: If some action waits for one that never runs (a deadlock).
        """
        slots: dict[Action, int] = {}
        heads = [0] * len(self.orders)
        slot = 0
        while waiting := {
            p: order[head]
            for p, (order, head) in enumerate(zip(self.orders, heads, strict=True))
            if head < len(order)
        }:
            ready = [
                (p, action)
                for p, action in waiting.items()
                if all(slots.get(d, slot) < slot for d in self.dependencies(action))
            ]
            if not ready:
                raise ValueError(self._describe_deadlock(waiting, slots))
            for p, action in ready:
                slots[action] = slot
                heads[p] += 1
            slot += 1
        return slots

    def actions(self, *kinds: ActionKind) -> tuple[Action, ...]:
        """Returns all actions of these kinds, dependencies first."""
        return tuple(action for action in self.slots if action.kind in kinds)

    @functools.cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage its microbatches in flight when its device has most.

        A microbatch is in flight from its forward to the end of its backward.
        """
        most = [0] * self.num_stages
        for order in self.orders:
            counts = {action.stage: 0 for action in order}
            largest = 0
            for action in order:
                if action.kind == "forward":
                    counts[action.stage] += 1
                elif action.kind != "backward_input":
                    counts[action.stage] -= 1
                if sum(counts.values()) > largest:
                    largest = sum(counts.values())
                    for k, count in counts.items():
                        most[k] = count
        return tuple(most)

    @functools.cached_property
    def in_backward(self) -> tuple[int, ...]:
        """For each stage the most microbatches whose backward is under way."""
        most = [1] * self.num_stages
        begun = [0] * self.num_stages
        for order in self.orders:
            for action in order:
                if action.kind == "backward_input":
                    begun[action.stage] += 1
                elif action.kind == "backward_weight":
                    begun[action.stage] -= 1
                most[action.stage] = max(most[action.stage], begun[action.stage])
        return tuple(most)

    def backward_follows_immediately(self, k: int, m: int) -> bool:
        """Returns whether a backward is its device's next action after the forward."""
        return (k, m) in self._followed

    @functools.cached_property
    def _followed(self) -> frozenset[tuple[int, int]]:
        """Stage and microbatch of the forwards that the own backward follows."""
        return frozenset(
            (a.stage, a.microbatch)
            for a, b in itertools.chain(*map(itertools.pairwise, self.orders))
            if a.kind == "forward"
            and (a.stage, a.microbatch) == (b.stage, b.microbatch)
        )

    def validate(self) -> Schedule:
        """Returns the schedule itself if it can be run and computes all gradients.

        Raises:
            ValueError: If actions are missing, come twice or are of no stage or
                microbatch; if a stage is on two devices; if the forwards of a stage do
                not come in the order of microbatches, in which statistics and seeds
                are carried; or if actions wait for each other.
        """
        self._check_complete()
        for p, order in enumerate(self.orders):
            for action in order:
                if self.placement[action.stage] != p:
                    raise ValueError(
                        "A stage runs on one device, where its weights are. Received "
                        f"actions of stage {action.stage} on devices {p} and "
                        f"{self.placement[action.stage]}."
                    )
        for k in range(self.num_stages):
            order = self.orders[self.placement[k]]
            forwards = [
                a.microbatch for a in order if (a.kind, a.stage) == ("forward", k)
            ]
            if forwards != sorted(forwards):
                raise ValueError(
                    "The forwards of a stage go in the order of microbatches, since "
                    "seeds and statistics are handed from one to the next. Received "
                    f"forwards of stage {k} in the order {forwards}. Backwards can "
                    "come in any order."
                )
        _ = self.slots  # Raises where it would deadlock.
        return self

    def _check_complete(self) -> None:
        K, M = self.num_stages, self.num_microbatches
        counts = collections.Counter(a for order in self.orders for a in order)
        twice = next((action for action, count in counts.items() if count > 1), None)
        if twice is not None:
            raise ValueError(
                f"Each action runs once. Received twice: {twice.describe()}."
            )
        expected = {
            action
            for k in range(K)
            for m in range(M)
            for action in (Action("forward", k, m), *self._backward(k, m))
        }
        for what, some in (
            ("lacks", sorted(expected - self._all)),
            ("has beside all that is needed", sorted(self._all - expected)),
        ):
            if some:
                raise ValueError(
                    "A schedule runs each stage forward and backward, or backward in "
                    "its two halves, on each microbatch. Received one of "
                    f"{K} stages and {M} microbatches that {what} "
                    f"{some[0].describe()}"
                    + (f", and {len(some) - 1} more." if some[1:] else ".")
                )

    def _backward(self, k: int, m: int) -> tuple[Action, ...]:
        """Returns the backward, or its halves, that of the inputs first."""
        inputs = Action("backward_input", k, m)
        if inputs in self._all:
            return (inputs, Action("backward_weight", k, m))
        return (Action("backward", k, m),)

    @functools.cached_property
    def _all(self) -> frozenset[Action]:
        return frozenset(action for order in self.orders for action in order)

    def _describe_deadlock(
        self, waiting: Mapping[int, Action], finished: Collection[Action]
    ) -> str:
        """Says which actions wait for one another when none can go on."""
        lines: list[str] = []
        p = next(iter(waiting))
        seen: set[int] = set()
        while p not in seen and p in waiting:
            seen.add(p)
            action = waiting[p]
            missing = next(d for d in self.dependencies(action) if d not in finished)
            here, there = f"{action.describe()},", missing.describe()
            other = next((q for q, o in enumerate(self.orders) if missing in o), None)
            if other is None:
                lines.append(f"the {here} waits for the {there}, which no device runs")
                break
            if other == p:
                there += f", which comes behind it on device {p}"
            else:
                here, there = f"{here} on device {p}", f"{there}, on device {other}"
            lines.append(f"the {here} waits for the {there}")
            p = other
        return (
            f"The schedule deadlocks: {'; '.join(lines)}. Put each action behind those "
            "it needs."
        )


def draw(schedule: Schedule) -> str:
    """Draws a schedule as text: devices down, time slots across, idle as dots.

    Of several stages on a device, the first is marked a, the second b.

    >>> print(tfgpipe.schedules.draw(tfgpipe.schedules.one_f_one_b(2, 3)))
    stage 0  F0 F1 .. B0 F2 B1 .. B2
    stage 1  .. F0 B0 F1 B1 F2 B2 ..
    """
    slots = schedule.slots
    num_slots = max(slots.values(), default=-1) + 1
    labels = action_labels(schedule)
    width = max(map(len, labels.values()), default=2)
    one_each = schedule.num_devices == schedule.num_stages
    lines = []
    for device, order in enumerate(schedule.orders):
        row = {slots[action]: labels[action] for action in order}
        cells = [row.get(s, "." * width).ljust(width) for s in range(num_slots)]
        name = "stage" if one_each else "device"
        lines.append(f"{name} {device}  " + " ".join(cells).rstrip())
    return "\n".join(lines)


def action_labels(schedule: Schedule) -> dict[Action, str]:
    """Returns a short name for each action, such as F3, or F3b of a second stage."""
    labels = {}
    for order in schedule.orders:
        stages = sorted({action.stage for action in order})
        marks = "abcdefghijklmnopqrstuvwxyz" if len(stages) > 1 else ""
        for a in order:
            rank = stages.index(a.stage)
            labels[a] = f"{a}{marks[rank : rank + 1]}"
    return labels
