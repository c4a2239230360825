"""Simulation of a schedule with given costs: times, bubble, memory.

Each device runs its actions in their order. An action starts when its device is free
and what it needs has arrived; results travel while devices compute. On the link from
one device to another, transfers go one after the other:

    device 0      ├F0┼F1┤
    link 0 ▶ 1       ├── 0 ──┼── 1 ──┤           bytes / bandwidth each, in turn
    device 1                  · ├F0┤  · ├F1┤     there a latency after

The bubble and the microbatches in flight are those of the papers on GPipe (Huang et al.
2019, section 2.3), Megatron-LM (Narayanan et al. 2021, section 2.2) and zero bubble
schedules (Qi et al. 2024, section 2).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from tfgpipe._util import argument_checks, readable_bytes
from tfgpipe.schedules import Action, ActionKind, Schedule, kinds
from tfgpipe.simulation.timeline import (
    Span,
    Timeline,
    TimeSeries,
    TransferSpan,
    stays,
    time_series,
)

_BANDWIDTHS = ("bandwidth", "host_bandwidth", "gather_bandwidth")
# One number for all stages, or one for each.
PerStage: TypeAlias = float | Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Times and bytes of the actions of each stage, for one microbatch.

    Without arguments the unit of time is a forward, a backward takes twice as long,
    transfers are free, and nothing holds memory. What is given for each stage is one
    number for all or a sequence of K; `boundary_bytes`, one of K - 1.

    Attributes:
        forward: Seconds of a forward.
        backward: Seconds of a whole backward, recomputation not included.
        backward_input: Seconds of the gradients of inputs, where backwards are split.
            None for half of `backward`.
        backward_weight: Seconds of the gradients of weights, where backwards are split.
        recompute: Seconds of recomputing the activations, right before the backward.
        recompute_when: `"asked"`, when the gradients are there, as this library does;
            or `"early"`, while the device waits for them, as GPipe does (Huang et al.
            2019, section 2.3).
        latency: Seconds that a transfer takes in addition to those in which it keeps
            the link busy.
        bandwidth: Bytes a second of each link between two devices, in each direction.
        host_bandwidth: Bytes a second between a device and its host, in each direction.
        gather_bandwidth: Bytes a second at which a device receives slices of weights.
        boundary_bytes: Bytes from a stage to each that reads from it, of all stages but
            the last; as many gradients go back. Free if both are on one device.
        kept_bytes: Bytes held for a microbatch from the start of its forward to the end
            of its backward: with rematerialisation, the inputs of the stage; without,
            all activations.
        backward_bytes: Bytes held in addition from the start of the backward, its
            recomputation included, to its end: what is recomputed.
        fixed_bytes: Bytes held throughout: weights, gradients, optimizer slots.
        gathered_bytes: Bytes held from a gather of a stage's weights to the last pass
            that reads them: what the slices of other replicas take.

    Raises:
        ValueError: If a number is negative or not finite, or if only one half of the
            backward is given.

    Example, of two stages of which the second takes twice as long:

    >>> costs = tfgpipe.Costs(forward=[1, 2], backward=[2, 4])
    >>> tfgpipe.simulate(tfgpipe.schedules.gpipe(2, 4), costs).timeline.step_time
    27.0
    """

    forward: PerStage = 1
    backward: PerStage = 2
    backward_input: PerStage | None = None
    backward_weight: PerStage | None = None
    recompute: PerStage = 0
    recompute_when: Literal["asked", "early"] = "asked"
    latency: float = 0
    bandwidth: float = math.inf
    host_bandwidth: float = math.inf
    gather_bandwidth: float = math.inf
    boundary_bytes: PerStage = 0
    kept_bytes: PerStage = 0
    backward_bytes: PerStage = 0
    fixed_bytes: PerStage = 0
    gathered_bytes: PerStage = 0

    def __post_init__(self) -> None:
        if (self.backward_input is None) != (self.backward_weight is None):
            raise ValueError(
                "The halves of a backward are given together. Received "
                f"backward_input={self.backward_input} and "
                f"backward_weight={self.backward_weight}. Give both, or neither for "
                "half of `backward` each."
            )
        for name in _BANDWIDTHS:
            value: Any = getattr(self, name)
            if not isinstance(value, numbers.Real) or not float(value) > 0:
                raise ValueError(
                    f"`{name}` is a number of bytes a second above 0. Received "
                    f"{name}={value!r}. Leave it out for free transfers."
                )
        for name, value in vars(self).items():
            if isinstance(value, Sequence) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))  # It has a hash.
        if self.recompute_when not in ("asked", "early"):
            raise ValueError(
                '`recompute_when` is "asked" or "early". Received '
                f"recompute_when={self.recompute_when!r}. Leave it out for what this "
                "library does."
            )
        for name, values in self._per_stage().items():
            if not all(
                isinstance(x, numbers.Real) and 0 <= x < math.inf for x in values
            ):
                raise ValueError(
                    f"`{name}` holds finite numbers of at least 0. Received "
                    f"{name}={getattr(self, name)!r}. Use 0 for what is free."
                )

    def seconds(self, name: str, k: int) -> float:
        """Returns the time of one kind of pass on stage k, in seconds."""
        values = getattr(self, name)
        if values is None:  # Half of a split backward.
            return _for_stage(self.backward, k) / 2
        return _for_stage(values, k)

    def bytes_of(self, name: str, k: int) -> float:
        """Returns the bytes of one kind that stage k has."""
        return _for_stage(getattr(self, name), k)

    def host_seconds(self, k: int) -> float:
        """Returns the time in which a microbatch of stage k goes to the host."""
        return self.bytes_of("kept_bytes", k) / self.host_bandwidth

    def gather_seconds(self, k: int) -> float:
        """Returns the time in which the weights of stage k are gathered."""
        return self.bytes_of("gathered_bytes", k) / self.gather_bandwidth

    def check_num_stages(self, num_stages: int) -> None:
        """Raises ValueError unless there are numbers for all of so many stages."""
        for name in self._per_stage():
            value = getattr(self, name)
            expected, what = num_stages, "stage"
            if name == "boundary_bytes":
                expected, what = expected - 1, "boundary between stages"
            if isinstance(value, Sequence) and len(value) != expected:
                raise ValueError(
                    f"`{name}` is one number, or one for each {what}: {expected} here. "
                    f"Received {len(value)}: {name}={value}. Add or drop numbers, or "
                    "give one for all."
                )

    def _per_stage(self) -> dict[str, tuple[float, ...]]:
        """Returns the values of each attribute of the stages by its name."""
        values = dict(vars(self))
        for name in (*_BANDWIDTHS, "recompute_when"):
            del values[name]
        return {
            name: tuple(value) if isinstance(value, Sequence) else (value,)
            for name, value in values.items()
            if value is not None
        }


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A schedule run with given costs.

    Attributes:
        timeline: The timeline of all devices.
        costs: The costs of its actions and transfers.
    """

    timeline: Timeline
    costs: Costs

    @property
    def fixed_bytes(self) -> tuple[float, ...]:
        """For each device the bytes that it holds throughout."""
        schedule = self.timeline.schedule
        held = [0.0] * schedule.num_devices
        names = ["fixed_bytes"]
        if not any(action.kind.gathers for action in schedule.slots):
            names.append("gathered_bytes")  # Once, at the beginning.
        for k, p in enumerate(schedule.placement):
            held[p] += sum(self.costs.bytes_of(name, k) for name in names)
        return tuple(held)

    @functools.cached_property
    def memory(self) -> tuple[TimeSeries, ...]:
        """For each device the bytes that it holds over time.

        What is freed as something else begins makes room for it.
        """
        costs, base = self.costs, self.fixed_bytes
        changes: list[list[tuple[float, float]]] = [[] for _ in base]
        for (k, _), spans in self.timeline.spans_by_microbatch().items():
            p, kept = spans[0].device, costs.bytes_of("kept_bytes", k)
            for start, end in stays(spans):
                changes[p] += [(start, kept), (end, -kept)]
            passes = (span for span in spans if not span.kind.is_copy)
            begun = next(span.start for span in passes if span.kind.is_backward)
            again = costs.bytes_of("backward_bytes", k)
            changes[p] += [(begun, again), (end, -again)]
        for p, k, start, end in self._gathered():
            size = costs.bytes_of("gathered_bytes", k)
            changes[p] += [(start, size), (end, -size)]
        start = self.timeline.start
        return tuple(
            time_series(some, start=start, base=fixed)
            for some, fixed in zip(changes, base, strict=True)
        )

    def _gathered(self) -> list[tuple[int, int, float, float]]:
        """Returns spans of gathered weights on devices: device, stage, start and end.

        It is from the start of a gather to the last pass before the next one.
        """
        schedule = self.timeline.schedule
        spans = {(x.kind, x.stage, x.microbatch): x for x in self.timeline.spans}
        held: list[tuple[int, int, float, float]] = []
        for p, order in enumerate(schedule.orders):
            since: dict[int, float] = {}
            last: dict[int, float] = {}
            waiting: dict[Action, float] = {}
            for a in order:
                span = spans[a.kind, a.stage, a.microbatch]
                if a.kind.gathers:
                    waiting[a] = span.start
                    continue
                for gather in schedule.dependencies(a):
                    if gather in waiting:
                        if a.stage in since:
                            held.append((p, a.stage, since[a.stage], last[a.stage]))
                        since[a.stage] = waiting.pop(gather)
                last[a.stage] = span.end
            held += [(p, k, start, last[k]) for k, start in since.items()]
        return held

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """For each device the most bytes that it holds at a time."""
        return tuple(max(held for _, held in steps) for steps in self.memory)

    @functools.cached_property
    def exposed_communication(self) -> float:
        """Seconds by which the step is longer than with free transfers."""
        free = dataclasses.replace(self.costs, latency=0, bandwidth=math.inf)
        computed = simulate(self.timeline.schedule, free).timeline.step_time
        return self.timeline.step_time - computed

    def __str__(self) -> str:
        most = max(self.peak_bytes)
        return (
            f"{self.timeline}\n"
            f"exposed communication {1e3 * self.exposed_communication:,.2f} ms, most "
            f"memory {readable_bytes(most)}, on device {self.peak_bytes.index(most)}"
        )


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Simulates a schedule: when each action runs, and what devices hold.

    >>> from tfgpipe import Costs, simulate
    >>> from tfgpipe.schedules import gpipe, one_f_one_b
    >>> costs = Costs(forward=1, backward=2, kept_bytes=1024)
    >>> simulate(one_f_one_b(4, 8), costs).timeline.step_time
    33.0
    >>> [simulate(s, costs).peak_bytes[0] for s in (one_f_one_b(4, 8), gpipe(4, 8))]
    [4096.0, 8192.0]

    Args:
        schedule: The ordered actions of each device.
        costs: The costs of actions and transfers.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If there are costs of another number of stages, or the schedule
            deadlocks.
    """
    hint = " Make one: `tfgpipe.schedules.gpipe(K, M)`."
    argument_checks.check_instance("schedule", schedule, Schedule, hint=hint)
    hint = " Make them: `tfgpipe.Costs(...)`."
    argument_checks.check_instance("costs", costs, Costs, hint=hint)
    costs.check_num_stages(schedule.num_stages)
    placement = schedule.placement
    ends: dict[Action, float] = {}
    # Of results, at stages on other devices.
    arrivals: dict[tuple[Action, int], float] = {}
    device_free: list[float] = [0] * schedule.num_devices
    # By device and kind: copies go one after the other.
    copies_free: dict[tuple[int, ActionKind], float] = collections.defaultdict(float)
    link_free: dict[tuple[int, int], float] = collections.defaultdict(float)
    spans: list[Span] = []
    transfers: list[TransferSpan] = []
    # All that goes over a link comes from one device, so that the order of actions is
    # that of transfers, too.
    for action in schedule.slots:
        k, kind, p = action.stage, action.kind, placement[action.stage]
        needed = [arrivals.get((d, k), ends[d]) for d in schedule.dependencies(action)]
        if kind.is_copy:
            frees = kind.in_flight < 0  # Else it takes memory, from its place on.
            time = max([*needed, copies_free[p, kind], device_free[p] * (not frees)])
            ends[action] = copies_free[p, kind] = end = time + kind.seconds(costs, k)
            device_free[p] = max(device_free[p], end * frees)
            spans.append(Span(kind, k, action.microbatch, p, time, end))
            continue
        spans += _work(costs, action, p, free=device_free[p], ready=max([0.0, *needed]))
        ends[action] = device_free[p] = end = spans[-1].end
        for receiver in schedule.receivers(action):
            if placement[receiver] != p:
                link = p, placement[receiver]
                start = max(end, link_free[link])
                sent = _transfer(costs, action, receiver, start)
                link_free[link] = sent.end - costs.latency
                arrivals[action, receiver] = sent.end
                transfers.append(sent)
    title = f"{schedule.name}, simulated"
    return Simulation(Timeline(schedule, tuple(spans), tuple(transfers), title), costs)


def _work(
    costs: Costs, action: Action, p: int, *, free: float, ready: float
) -> list[Span]:
    """Returns the spans of an action on device p, which is free from a time on."""
    k, m, kind = action.stage, action.microbatch, action.kind
    ready = time = max(free, ready)
    spans = []
    if kind.recomputes and (recompute := kinds.RECOMPUTE.seconds(costs, k)):
        start = free if costs.recompute_when == "early" else ready
        spans.append(Span(kinds.RECOMPUTE, k, m, p, start, start + recompute))
        time = max(start + recompute, ready)
    return [*spans, Span(kind, k, m, p, time, time + kind.seconds(costs, k))]


def _transfer(
    costs: Costs, action: Action, receiver: int, start: float
) -> TransferSpan:
    """Returns the transfer of an action's results to another device."""
    k = action.stage
    seconds = costs.bytes_of("boundary_bytes", min(k, receiver)) / costs.bandwidth
    end = start + seconds + costs.latency
    return TransferSpan(k, receiver, action.microbatch, start, end)


def costs_of(timeline: Timeline) -> Costs:
    """Returns the costs of a step, to simulate it with transfers that are free.

    Those of a stage are means over its microbatches. So are those of recomputation,
    though it may have been of some of them only.

    Args:
        timeline: A step, measured or simulated.

    Raises:
        ValueError: If it lacks spans of a stage.
    """
    schedule = timeline.schedule
    seconds: dict[tuple[ActionKind, int], list[float]] = collections.defaultdict(list)
    for span in timeline.spans:
        seconds[span.kind, span.stage].append(span.duration)

    def mean(kind: ActionKind, k: int) -> float | None:
        some = seconds[kind, k]
        return sum(some) / len(some) if some else None

    rows = []
    for k in range(schedule.num_stages):
        forward, whole = mean(kinds.FORWARD, k), mean(kinds.BACKWARD, k)
        of_inputs = mean(kinds.BACKWARD_INPUT, k)
        of_weights = mean(kinds.BACKWARD_WEIGHT, k)
        if of_inputs is None or of_weights is None:
            of_inputs = of_weights = None if whole is None else whole / 2
        if forward is None or of_inputs is None or of_weights is None:
            raise ValueError(
                "Costs are means over all microbatches of each stage. Received a "
                f"timeline without a forward or a whole backward of stage {k}. Measure "
                "a step that trains."
            )
        both = of_inputs + of_weights if whole is None else whole
        again = sum(seconds[kinds.RECOMPUTE, k]) / schedule.num_microbatches
        rows.append((forward, both, of_inputs, of_weights, again))
    columns: list[Any] = list(zip(*rows, strict=True))
    names = (
        "forward", "backward", "backward_input", "backward_weight", "recompute"
    )  # fmt: skip
    return Costs(**dict(zip(names, columns, strict=True)))


def _for_stage(values: PerStage, k: int) -> float:
    return values[k] if isinstance(values, Sequence) else values
