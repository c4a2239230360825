"""The order in which devices run the actions of a mini-batch, as a plain value.

An *action* is one run of a stage function: the forward of a stage `k` on a microbatch
`m`, its backward, or one half of a split backward: input gradients, which the previous
stage waits for, or weight gradients, which no other stage needs. A *schedule* is, for
each device, the ordered list of its actions. Nothing here computes; `tfgpipe.runtime`
turns a schedule into TensorFlow operations, `tfgpipe.simulation` into times.

The dependencies of an action follow from the data flow between the stages, in which
stage k reads from some (`sources`) and is read by some (`targets`):

    F source, m ─▶ F k, m ─▶ F target, m      forward: of the sources
                     │
                     ▼
    B source, m ◀─ B k, m ◀─ B target, m      backward: of the targets
                     │
                     ▼
                   W k, m                     gradients of weights, where B is split
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from tfgpipe._util import argument_checks
from tfgpipe.schedules import kinds, text
from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.kinds import ActionKind


@dataclasses.dataclass(frozen=True, order=True, init=False)
class Action:
    """One run of a stage function on a microbatch.

    Args:
        kind: `"forward"`; `"backward"`, of inputs and weights; or one of its halves,
            `"backward_input"` or `"backward_weight"`. Or an `ActionKind`.
        stage: k, counted from the pipeline's input.
        microbatch: m.

    Attributes:
        kind: The kind, as a value.
        stage: k, counted from the pipeline's input.
        microbatch: m.

    Example:

    >>> str(tfgpipe.Action("forward", 0, 3))
    'F3'
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __init__(self, kind: str | ActionKind, stage: int, microbatch: int) -> None:
        object.__setattr__(self, "kind", kinds.find(kind))
        object.__setattr__(self, "stage", stage)
        object.__setattr__(self, "microbatch", microbatch)
        if stage < 0 or microbatch < 0:
            raise ValueError(
                "An action has a stage and a microbatch of at least 0. Received "
                f"Action({self.kind.name!r}, {stage}, {microbatch})."
            )

    def __hash__(self) -> int:
        # Computed for each action and dependency; that of `kind` takes longer.
        return hash((self.kind.name, self.stage, self.microbatch))

    def of(self, kind: ActionKind) -> Action:
        """Returns the action of another kind, of the same stage and microbatch."""
        return Action(kind, self.stage, self.microbatch)

    def at(self, stage: int) -> Action:
        """Returns the action of another stage, of the same kind and microbatch."""
        return Action(self.kind, stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.kind.letter}{self.microbatch}"

    def describe(self) -> str:
        """Returns the action in words."""
        kind = self.kind.name.replace("_", " ")
        return f"{kind} of stage {self.stage}, microbatch {self.microbatch}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The ordered actions of every device.

    Attributes:
        num_stages: K, the number of stages, counting each of several on one device.
        num_microbatches: M, the number of microbatches in a mini-batch.
        orders: For each device, its actions in the order it runs them.
        name: Name in tables and pictures.
        flow: The data flow between the stages. None for a line.

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
    flow: DataFlow | None = None

    # Stages are dealt to the devices that are named, as by a `SchedulePolicy`.
    deals_stages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.flow == DataFlow.line(self.num_stages):  # One value for it.
            object.__setattr__(self, "flow", None)

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
        needed = action.kind.needs(self, action)
        kind = kinds.GATHERS.get(action.kind) if self._gathers else None
        gather = kind and action.of(kind)
        return (*needed, gather) if gather in self._gathers else needed

    @functools.cached_property
    def data_flow(self) -> DataFlow:
        """The data flow between the stages."""
        return self.flow or DataFlow.line(self.num_stages)

    def sources(self, k: int) -> tuple[int, ...]:
        """Returns the stages that send stage k their outputs."""
        return self.data_flow.sources[k]

    def targets(self, k: int) -> tuple[int, ...]:
        """Returns the stages that stage k sends its outputs to."""
        return self.data_flow.targets[k]

    def receivers(self, action: Action) -> tuple[int, ...]:
        """Returns the stages that the results of an action are sent to."""
        if not action.kind.sends:
            return ()
        sends_on = action.kind.sends > 0
        return (self.targets if sends_on else self.sources)(action.stage)

    def to_csv(self) -> str:
        r"""Returns the actions as CSV, as `torch.distributed.pipelining` reads them.

        A row is a device, a column a time slot, and `0F2` the forward of stage 0 on
        microbatch 2. `B` is a backward, `I` and `W` are its halves.

        >>> tfgpipe.schedules.one_f_one_b(2, 2).to_csv()
        '0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n'

        Raises:
            ValueError: If it has actions that torch does not have, or deadlocks.
        """
        rows = []
        for order in self.orders:
            row: list[text.Entry | None] = []
            for action in order:
                row += [None] * (self.slots[action] - len(row))
                row.append((action.kind, action.stage, action.microbatch))
            rows.append(row)
        return text.write_csv(rows)

    @classmethod
    def from_csv(
        cls, csv: str, *, flow: DataFlow | None = None, name: str = "custom"
    ) -> Schedule:
        r"""Returns the schedule of a file that torch's or torchtitan's tools wrote.

        Sends, receives and the like are left out: the executor does what it must.
        Idle slots are too: devices run what they can at once.

        >>> tfgpipe.Schedule.from_csv("0F0,,,0B0\n,1F0,1B0,").num_stages
        2

        Args:
            csv: Content of the file.
            flow: The data flow between the stages, which no file has. Defaults to a
                line.
            name: Name in tables and pictures.

        Raises:
            ValueError: If a cell is of another form, or the schedule cannot be run.
        """
        return cls._of(text.read_csv(csv), name, flow)

    @classmethod
    def from_drawing(
        cls,
        drawing: str,
        *,
        placement: Sequence[int] | None = None,
        flow: DataFlow | None = None,
        name: str = "custom",
    ) -> Schedule:
        """Returns the schedule that `tfgpipe.schedules.draw` drew.

        Args:
            drawing: The rows of the drawing.
            placement: For each stage, the index of its device, if they are not dealt
                round robin.
            flow: The data flow between the stages. Defaults to a line.
            name: Name in tables and pictures.

        Raises:
            ValueError: If the text is of another form, or the schedule cannot be run.
        """
        return cls._of(text.read_drawing(drawing, placement), name, flow)

    @classmethod
    def _of(
        cls, rows: Sequence[Sequence[text.Entry]], name: str, flow: DataFlow | None
    ) -> Schedule:
        """Returns the schedule of actions that text had, checked."""
        orders = tuple(tuple(itertools.starmap(Action, row)) for row in rows)
        actions = [*itertools.chain(*orders)]
        K = 1 + max((action.stage for action in actions), default=-1)
        M = 1 + max((action.microbatch for action in actions), default=-1)
        argument_checks.check_schedule_size(K, M)
        return cls(K, M, orders, name, flow).validate()

    def insert_before(self, kind: ActionKind, *others: ActionKind) -> Schedule:
        """Returns a schedule with an action of one kind before each of others.

        It is of the same stage and microbatch.

        Args:
            kind: The kind to insert.
            *others: The kinds to insert it before.
        """
        orders = (
            tuple(
                each
                for a in order
                for each in ((a.of(kind), a) if a.kind in others else (a,))
            )
            for order in self.orders
        )
        return dataclasses.replace(self, orders=tuple(orders))

    def without_copies(self) -> Schedule:
        """Returns the schedule without copies, as no backward needs any."""
        if not self.has_copies:
            return self
        orders = (tuple(a for a in o if not a.kind.is_copy) for o in self.orders)
        return dataclasses.replace(self, orders=tuple(orders))

    def first_microbatches(self, num_microbatches: int) -> Schedule:
        """Returns the schedule without any but the first microbatches."""
        if num_microbatches >= self.num_microbatches:
            return self
        orders = (
            tuple(a for a in order if a.microbatch < num_microbatches)
            for order in self.orders
        )
        return dataclasses.replace(
            self, num_microbatches=num_microbatches, orders=tuple(orders)
        )

    def with_flow(self, flow: DataFlow) -> Schedule:
        """Returns the same actions of stages with another data flow.

        Raises:
            ValueError: If actions wait for each other then.
        """
        if flow == self.data_flow:
            return self
        return dataclasses.replace(self, flow=flow).validate()

    def on(
        self,
        placement: Sequence[int],
        num_microbatches: int,
        flow: DataFlow | None = None,
    ) -> Schedule:
        """Returns the schedule itself, if it has the stages on these devices.

        Args:
            placement: For each stage, the index of its device.
            num_microbatches: M.
            flow: The data flow between the stages, or None for its own.

        Raises:
            ValueError: If it is for other devices or microbatches.
        """
        if num_microbatches != self.num_microbatches:
            raise ValueError(
                f"Schedule '{self.name}' is for {self.num_microbatches} "
                f"microbatches. Received num_microbatches={num_microbatches}."
            )
        if self.placement != tuple(placement):
            raise ValueError(
                f"Schedule '{self.name}' has its stages on devices "
                f"{self.placement}, by index. Received devices that have them on "
                f"{tuple(placement)}. Give the stages' `devices` in the order of the "
                "schedule."
            )
        return self if flow is None else self.with_flow(flow)

    def fitted(self, costs: Callable[[], Any], memory_limit: Any) -> Schedule:
        """Returns the schedule, whatever the costs of the stages."""
        del costs, memory_limit
        return self

    def check_num_stages(self, num_stages: int | None) -> int:
        """Returns K; raises ValueError if another is given, or nothing can run."""
        self.validate()
        if num_stages not in (None, self.num_stages):
            raise ValueError(
                "A schedule says how many stages there are. Received one of "
                f"{self.num_stages} stages, and num_stages={num_stages}."
            )
        return self.num_stages

    def choose_num_devices(self, num_stages: int, available: int) -> int:
        """Returns P, that of the schedule."""
        del num_stages, available
        return self.num_devices

    def deal(self, num_stages: int, num_devices: int) -> tuple[int, ...]:
        """Returns the index of each stage's device.

        Raises:
            ValueError: If the schedule is for another number of devices.
        """
        del num_stages
        if num_devices != self.num_devices:
            raise ValueError(
                f"The schedule is for {self.num_devices} devices. Received "
                f"{num_devices}. Name as many `devices`, or make them: "
                f"`tfgpipe.make_logical_cpus({self.num_devices})`."
            )
        return self.placement

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

    def actions(self, *, is_backward: bool) -> tuple[Action, ...]:
        """Returns the actions before the loss, or those after, dependencies first."""
        return tuple(x for x in self.slots if x.kind.is_backward == is_backward)

    @functools.cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage its microbatches in flight when its device has most.

        A microbatch is in flight from its forward to the end of its backward. Stages
        that share a device have most at different times: see `most_held`.
        """
        most = [0] * self.num_stages
        for held in self._held:
            for k, count in max(held, key=lambda counts: sum(counts.values())).items():
                most[k] = count
        return tuple(most)

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Returns for each device the most that it holds of microbatches in flight.

        >>> tfgpipe.schedules.interleaved(4, 4, num_devices=2).most_held([1, 1, 9, 9])
        (21, 11)

        Args:
            sizes: For each stage, what it holds of a microbatch in flight: bytes.
        """
        return tuple(
            max(sum(n * sizes[k] for k, n in counts.items()) for counts in held)
            for held in self._held
        )

    @functools.cached_property
    def _held(self) -> tuple[list[dict[int, int]], ...]:
        """For each device, what its stages have in flight before each is ended."""
        devices = []
        for order in self.orders:
            counts = {action.stage: 0 for action in order}
            found: dict[tuple[int, ...], dict[int, int]] = {}
            for action in order:
                if action.kind.in_flight < 0:
                    found.setdefault(tuple(counts.values()), dict(counts))
                counts[action.stage] += action.kind.in_flight
            devices.append([*found.values()] or [counts])
        return tuple(devices)

    @functools.cached_property
    def in_backward(self) -> tuple[int, ...]:
        """For each stage the most microbatches whose backward is under way."""
        most = [1] * self.num_stages
        begun = [0] * self.num_stages
        for order in self.orders:
            for action in order:
                begun[action.stage] += action.kind.in_backward
                most[action.stage] = max(most[action.stage], begun[action.stage])
        return tuple(most)

    @functools.cached_property
    def has_copies(self) -> bool:
        """True if microbatches or weights are copied, as the device goes on."""
        return any(action.kind.is_copy for action in self._all)

    @functools.cached_property
    def splits_backwards(self) -> bool:
        """True if some backwards run in two halves."""
        return any(action.kind.in_backward for action in self._all)

    def is_last_gradient(self, action: Action) -> bool:
        """Returns whether no later action adds to the gradients of its stage."""
        return action in self._last_gradients

    @functools.cached_property
    def _last_gradients(self) -> frozenset[Action]:
        last = {
            a.stage: a for order in self.orders for a in order if a.kind.adds_gradients
        }
        return frozenset(last.values())

    def backward_follows_immediately(self, k: int, m: int) -> bool:
        """Returns whether a backward is its device's next action after the forward."""
        return (k, m) in self._followed

    @functools.cached_property
    def _followed(self) -> frozenset[tuple[int, int]]:
        """Stage and microbatch of the forwards that the own backward follows."""
        return frozenset(
            (a.stage, a.microbatch)
            for order in self.orders
            for a, b in itertools.pairwise(x for x in order if x.kind.is_pass)
            if not a.kind.is_backward
            and (a.stage, a.microbatch) == (b.stage, b.microbatch)
        )

    @functools.cached_property
    def labels(self) -> Mapping[Action, str]:
        """A short name for each action: F3, or F3b of a device's second stage."""
        labels = {}
        for order in self.orders:
            stages = sorted({action.stage for action in order})
            marks = "abcdefghijklmnopqrstuvwxyz" if len(stages) > 1 else ""
            for a in order:
                rank = stages.index(a.stage)
                labels[a] = f"{a}{marks[rank : rank + 1]}"
        return labels

    def validate(self) -> Schedule:
        """Returns the schedule itself if it can be run and computes all gradients.

        Raises:
            ValueError: If actions are missing, come twice or are of no stage or
                microbatch; if a stage is on two devices; if the forwards of a stage do
                not come in the order of microbatches, in which statistics and seeds
                are carried; or if actions wait for each other.
        """
        if self.data_flow.num_stages != self.num_stages:
            raise ValueError(
                "The data flow is that between the stages of the schedule. Received "
                f"one of {self.data_flow.num_stages} stages for {self.num_stages}."
            )
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
                a.microbatch for a in order if (a.kind, a.stage) == (kinds.FORWARD, k)
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
            for action in (Action(kinds.FORWARD, k, m), *self.backward(k, m))
        }
        passes = {action for action in self._all if action.kind.is_pass}
        for what, some in (
            ("lacks", sorted(expected - passes)),
            ("has beside all that is needed", sorted(passes - expected)),
        ):
            if some:
                raise ValueError(
                    "A schedule runs each stage forward and backward, or backward in "
                    "its two halves, on each microbatch. Received one of "
                    f"{K} stages and {M} microbatches that {what} "
                    f"{some[0].describe()}"
                    + (f", and {len(some) - 1} more." if some[1:] else ".")
                )

    def backward(self, k: int, m: int) -> tuple[Action, ...]:
        """Returns the backward, or its halves, that of the inputs first."""
        inputs = Action(kinds.BACKWARD_INPUT, k, m)
        if inputs in self._all:
            return (inputs, inputs.of(kinds.BACKWARD_WEIGHT))
        return (Action(kinds.BACKWARD, k, m),)

    def brought(self, k: int, m: int) -> Action:
        """Returns the action after which the backward has what it reads of itself.

        It is the forward, or the copy that brings back what was on the host.
        """
        return self._brought[k, m]

    @functools.cached_property
    def _brought(self) -> dict[tuple[int, int], Action]:
        """The last action of each stage and microbatch that takes memory."""
        takes = (a for order in self.orders for a in order if a.kind.in_flight > 0)
        return {(action.stage, action.microbatch): action for action in takes}

    @functools.cached_property
    def _gathers(self) -> frozenset[Action]:
        return frozenset(action for action in self._all if action.kind.gathers)

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
    labels = schedule.labels
    width = max(map(len, labels.values()), default=2)
    one_each = schedule.num_devices == schedule.num_stages
    lines = []
    for device, order in enumerate(schedule.orders):
        row = {slots[action]: labels[action] for action in order}
        cells = [row.get(s, "." * width).ljust(width) for s in range(num_slots)]
        name = "stage" if one_each else "device"
        lines.append(f"{name} {device}  " + " ".join(cells).rstrip())
    return "\n".join(lines)
