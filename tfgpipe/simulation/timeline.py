"""Timelines: when each device does what, in a measured or simulated step.

    device 0  F0-F1-F2-F3-..................B0---B1---B2---B3---
    device 1  ...F0-F1-F2-F3-..........B0---B1---B2---B3---.....

The *bubble* is the share of all devices' time in which they wait. *Utilisation* is what
a device does not wait. *Efficiency* leaves out recomputation as well, which keeps a
device busy without bringing a step forward. *Imbalance* is the busiest device's time
over the mean one: what no schedule can make good.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from tfgpipe.schedules import Action, ActionKind, Schedule, kinds

# Columns of a terminal that a timeline as text takes at most.
WIDTH = 100
_START = operator.attrgetter("start")

# A value that changes over time: from each time on, to the next, the value.
TimeSeries = tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True, init=False)
class Span:
    """One entry of a timeline: a device at work on one stage and microbatch.

    Attributes:
        kind: An action's kind, or `"recompute"`, of the activations right before the
            backward that needs them. As a value, which may be given by its name.
        stage: k.
        microbatch: m.
        device: The index of the device.
        start: Its start, in seconds.
        end: Its end, in seconds.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    device: int
    start: float
    end: float

    def __init__(
        self,
        kind: str | ActionKind,
        stage: int,
        microbatch: int,
        device: int,
        start: float,
        end: float,
    ) -> None:
        vars(self).update(
            kind=kinds.find(kind),
            stage=stage,
            microbatch=microbatch,
            device=device,
            start=start,
            end=end,
        )

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class TransferSpan:
    """Activations or gradients on their way to another device.

    Attributes:
        from_stage: The stage that computed them.
        to_stage: The stage that needs them: a later one for activations, an earlier
            one for gradients.
        microbatch: m.
        start: Time of departure, in seconds.
        end: Time of arrival, in seconds.
    """

    from_stage: int
    to_stage: int
    microbatch: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step of a schedule.

    As text it is a drawing with its numbers:

    >>> from tfgpipe.schedules import gpipe
    >>> from tfgpipe.simulation import Span, Timeline
    >>> spans = (
    ...     Span("forward", 0, 0, 0, 0.000, 0.001),
    ...     Span("forward", 1, 0, 1, 0.001, 0.002),
    ...     Span("backward", 1, 0, 1, 0.002, 0.004),
    ...     Span("backward", 0, 0, 0, 0.004, 0.006),
    ... )
    >>> timeline = Timeline(gpipe(2, 1), spans)
    >>> timeline.bubble
    0.5
    >>> print(str(timeline).splitlines()[-1])
    step time 6.00 ms, bubble 50.0%, efficiency 50.0%, imbalance 1.00

    Attributes:
        schedule: The schedule of the devices.
        spans: Their work, in any order.
        transfers: Transfers between them, as far as they are known.
        title: A title for text and pictures.

    Raises:
        ValueError: If there are no spans, or they take no time.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    transfers: tuple[TransferSpan, ...] = ()
    title: str = ""

    def __post_init__(self) -> None:
        if not self.spans or not self.end > self.start:
            raise ValueError(
                "A timeline holds spans that take time. Received "
                f"{len(self.spans)} spans that take none together. Measure a step "
                "that trains, or give costs above 0."
            )

    @functools.cached_property
    def start(self) -> float:
        """Start of the first span, in seconds."""
        return min(span.start for span in self.spans)

    @functools.cached_property
    def end(self) -> float:
        """End of the last span, in seconds."""
        return max(span.end for span in self.spans)

    @property
    def step_time(self) -> float:
        """Seconds from the start of the first span to the end of the last."""
        return self.end - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each device works."""
        return self._seconds(self.spans)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The share of the step that each device works."""
        return tuple(seconds / self.step_time for seconds in self.busy)

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they wait."""
        return 1 - sum(self.utilisation) / self.schedule.num_devices

    @property
    def efficiency(self) -> float:
        """The share of all devices' time that is neither bubble nor recomputation."""
        useful = self._seconds(s for s in self.spans if s.kind.is_pass)
        return sum(useful) / (self.step_time * self.schedule.num_devices)

    @property
    def imbalance(self) -> float:
        """The time the busiest device works over the mean: 1.0 is perfect."""
        return imbalance(self.busy)

    def in_flight(self) -> tuple[TimeSeries, ...]:
        """Returns for each device the number of microbatches in flight over time.

        A microbatch is in flight at a stage from the start of its forward to the end
        of its backward, the later half where it is split, except while it is on the
        host. It counts once for each stage of the device.
        """
        P = self.schedule.num_devices
        changes: list[list[tuple[float, float]]] = [[] for _ in range(P)]
        for spans in self.spans_by_microbatch().values():
            for start, end in stays(spans):
                changes[spans[0].device] += [(start, 1), (end, -1)]
        return tuple(time_series(some, start=self.start) for some in changes)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each device the largest number of microbatches in flight."""
        return tuple(int(max(n for _, n in steps)) for steps in self.in_flight())

    def spans_by_microbatch(self) -> dict[tuple[int, int], list[Span]]:
        """Returns the spans of each stage and microbatch, in the order they start."""
        visits: dict[tuple[int, int], list[Span]] = {}
        for span in sorted(self.spans, key=_START):
            visits.setdefault((span.stage, span.microbatch), []).append(span)
        return visits

    def span_kinds(self) -> tuple[ActionKind, ...]:
        """Returns the kinds that occur, in the order in which a microbatch has them."""
        return tuple(kinds.sort(span.kind for span in self.spans))

    def __str__(self) -> str:
        words = ", ".join(
            dict.fromkeys(f"{x.letter} {x.label}" for x in self.span_kinds())
        )
        lines = [
            *([self.title] if self.title else []),
            *_rows(self),
            f"{words}, . idle; right: utilisation",
            f"step time {1e3 * self.step_time:,.2f} ms, bubble {self.bubble:.1%}, "
            f"efficiency {self.efficiency:.1%}, imbalance {self.imbalance:.2f}",
        ]
        return "\n".join(lines)

    def _seconds(self, spans: Iterable[Span]) -> tuple[float, ...]:
        """Returns the time of each device for some spans."""
        seconds: list[float] = [0] * self.schedule.num_devices
        for span in spans:
            if not span.kind.is_copy:  # The device works meanwhile, or waits.
                seconds[span.device] += span.duration
        return tuple(seconds)


def stays(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Returns the times from which to which a device holds a microbatch.

    Args:
        spans: The spans of one stage and microbatch, in the order they start.
    """
    starts = [span.start for span in spans if span.kind.in_flight > 0]
    ends = [span.end for span in spans if span.kind.in_flight < 0]
    last = max(span.end for span in spans)  # Of one without a backward.
    return [*itertools.zip_longest(starts, ends, fillvalue=last)]


def time_series(
    changes: Iterable[tuple[float, float]], *, start: float, base: float = 0
) -> TimeSeries:
    """Returns a value over time from what is added to it when.

    What happens at one time is one change: what is freed as something else begins
    makes room for it.

    >>> time_series([(1, 5), (2, -5), (2, 3)], start=0)
    ((0, 0), (1, 5), (2, 3))
    """
    sums = {start: base}
    for time, change in changes:
        sums[time] = sums.get(time, 0) + change
    times = sorted(sums)
    values = itertools.accumulate(sums[time] for time in times)
    return tuple(zip(times, values, strict=True))


def average_timelines(timelines: Sequence[Timeline]) -> Timeline:
    """Returns the mean of several steps: when each span starts and ends on average.

    The clock of each step begins with its first span.

    Args:
        timelines: Steps of one schedule, with the same spans and transfers.

    Raises:
        ValueError: If there is none, or they differ in more than times.
    """
    if not timelines:
        raise ValueError(
            "A mean needs at least one timeline. Received none. Measure more steps."
        )
    first = timelines[0]
    if any(timeline.schedule != first.schedule for timeline in timelines):
        some = sorted({describe_schedule(timeline.schedule) for timeline in timelines})
        raise ValueError(
            "Only timelines of one schedule have a mean. Received those of schedules "
            f"that differ: {'; '.join(some)}. Average the steps of each by themselves."
        )
    origins = [timeline.start for timeline in timelines]
    return Timeline(
        first.schedule,
        _mean_times([timeline.spans for timeline in timelines], origins),
        _mean_times([timeline.transfers for timeline in timelines], origins),
        first.title,
    )


def timeline_metrics(timeline: Timeline) -> dict[str, Any]:
    """Returns the metrics of a timeline by name, for JSON."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "num_devices": schedule.num_devices,
        "step_time_seconds": timeline.step_time,
        "bubble": timeline.bubble,
        "efficiency": timeline.efficiency,
        "imbalance": timeline.imbalance,
        "utilisation": list(timeline.utilisation),
        "busy_seconds": list(timeline.busy),
        "peak_live": list(timeline.peak_in_flight),
    }


def span_labels(timeline: Timeline) -> dict[Span, str]:
    """Returns a short name for each span, such as F3, or r3b of a second stage."""
    names = timeline.schedule.labels
    labels = {}
    for span in timeline.spans:
        name = names[Action(kinds.FORWARD, span.stage, span.microbatch)]
        labels[span] = span.kind.letter + name.removeprefix(kinds.FORWARD.letter)
    return labels


def describe_schedule(schedule: Schedule) -> str:
    """Returns a schedule's name and numbers in words."""
    return (
        f"{schedule.name}, {schedule.num_stages} stages on {schedule.num_devices} "
        f"devices, {schedule.num_microbatches} microbatches"
    )


def _rows(timeline: Timeline) -> list[str]:
    """Draws each device's time, which a column shows as it is at its middle."""
    labels = span_labels(timeline)
    names = [f"device {p}" for p in range(timeline.schedule.num_devices)]
    margin = max(map(len, names)) + 2
    num_columns = WIDTH - margin - len(" 100.0%")
    column = timeline.step_time / num_columns
    rows = []
    for p, name in enumerate(names):
        works = (s for s in timeline.spans if s.device == p and not s.kind.is_copy)
        mine = sorted(works, key=_START)
        middles = (timeline.start + (c + 0.5) * column for c in range(num_columns))
        runs = itertools.groupby(_span_at(mine, time) for time in middles)
        drawn = ""
        for span, run in runs:
            room = len(list(run))
            label = labels[span] if span else "." * room
            drawn += (label if len(label) <= room else label[0]).ljust(room, "-")
        rows.append(f"{name:{margin}}{drawn}{timeline.utilisation[p]:7.1%}")
    return rows


def _span_at(spans: Sequence[Span], time: float) -> Span | None:
    """Returns the one of a device's spans, sorted, that runs at a time, if any."""
    before = bisect.bisect_right(spans, time, key=_START)
    return spans[before - 1] if before and spans[before - 1].end > time else None


Timed = TypeVar("Timed", Span, TransferSpan)


def _mean_times(
    steps: Sequence[tuple[Timed, ...]], origins: Sequence[float]
) -> tuple[Timed, ...]:
    """Returns the entries of several steps, with the means of their times."""
    times: dict[Timed, list[tuple[float, float]]] = {}
    for step, origin in zip(steps, origins, strict=True):
        for one in step:
            key = dataclasses.replace(one, start=0, end=0)
            times.setdefault(key, []).append((one.start - origin, one.end - origin))
    for key, pairs in times.items():
        if len(pairs) != len(steps):
            raise ValueError(
                "Timelines with a mean hold the same spans and transfers. Received "
                f"{len(pairs)} times in {len(steps)} timelines: {key}. Leave out steps "
                "that were not measured whole."
            )
    return tuple(
        dataclasses.replace(
            key,
            start=math.fsum(start for start, _ in pairs) / len(pairs),
            end=math.fsum(end for _, end in pairs) / len(pairs),
        )
        for key, pairs in times.items()
    )


def imbalance(stage_costs: Sequence[float]) -> float:
    """Returns the largest stage cost over the mean one: 1.0 is perfect.

    With many microbatches, a mini-batch takes about so many times as long as it would
    with equal stages. Stages that all cost nothing are equal.

    >>> imbalance([3, 1, 2])
    1.5
    >>> imbalance([0, 0])
    1.0
    """
    total = math.fsum(stage_costs)
    return max(stage_costs) * len(stage_costs) / total if total else 1.0
