"""Pictures of schedules, timelines and meshes, drawn with Matplotlib.

Each function returns a figure, and writes it to `path` if given one, whose ending says
the format, such as `.png` or `.svg`. No display is needed: `pyplot`, with its global
state, is left alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfgpipe import schedules
from tfgpipe._util import readable_bytes
from tfgpipe.report.memory import MemoryGrid
from tfgpipe.schedules import Schedule
from tfgpipe.simulation import (
    KIND_LABELS,
    Costs,
    Simulation,
    SpanKind,
    Timeline,
    describe_schedule,
    simulate,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PathLike = str | os.PathLike[str]

# Colours that the colour-blind tell apart (Okabe and Ito 2008).
COLOURS: dict[SpanKind, str] = {
    "forward": "#0072B2",
    "recompute": "#E69F00",
    "backward": "#009E73",
    "backward_input": "#009E73",
    "backward_weight": "#CC79A7",
}
# Of curves: colour, line, marker and its size. 1F1B lies on GPipe.
LINE_STYLES: dict[schedules.Name, tuple[str, str, str, int]] = {
    "gpipe": ("#0072B2", "-", "o", 10),
    "1f1b": ("#E69F00", "--", "s", 5),
    "interleaved": ("#009E73", "-", "^", 6),
    "zero_bubble": ("#CC79A7", "-", "D", 5),
}
# Of parts of memory: colour and hatch.
PART_STYLES: tuple[tuple[str, str], ...] = (
    ("#0072B2", ""),
    ("#56B4E9", ""),
    ("#999999", ""),
    ("#009E73", ""),
    ("#E69F00", ""),
    ("#D55E00", ""),
    ("#CC79A7", ""),
    ("#000000", "///"),
)
# Of whatever comes in a series.
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
IDLE: dict[str, Any] = {
    "facecolor": "#FFFFFF",
    "edgecolor": "#BBBBBB",
    "hatch": "////",
    "linewidth": 0,
}

# Inches.
LEFT, RIGHT, ABOVE, BELOW, LEGEND = 0.9, 0.85, 0.62, 0.55, 0.4
ROW, BOX = 0.32, 0.8  # Of a device; the box's share of it.
NARROWEST, WIDEST = 6.5, 17.5  # Of axes.
CURVES = 3.5  # The height of axes that hold curves or bars.
# Points.
LABEL_SIZES = (8, 7, 6)
DIGIT = 0.64  # The width of a digit over its size.
MARGIN = 2  # Of a box around its label.


def plot_schedule(
    schedule: Schedule, *, costs: Costs | None = None, path: PathLike | None = None
) -> Figure:
    """Draws a schedule: devices down, time across, microbatches in the boxes.

    Args:
        schedule: What to draw.
        costs: What its actions take. By default a backward takes two forwards.
        path: Where to write the picture.

    Raises:
        ImportError: If Matplotlib is not installed.

    Example:

    >>> figure = tfgpipe.plot_schedule(tfgpipe.schedules.gpipe(2, 3))
    >>> [axes.get_xlabel() for axes in figure.axes]
    ['time in forwards']
    """
    timeline = simulate(schedule, costs or Costs()).timeline
    timeline = dataclasses.replace(timeline, title=describe_schedule(schedule))
    if costs is None:
        return _save(_gantt_charts([timeline], ("forwards", 1)), path)
    return plot_timelines([timeline], path=path)


def plot_timelines(
    timelines: Sequence[Timeline], *, path: PathLike | None = None
) -> Figure:
    """Draws timelines one above the other, on one axis of time, with their numbers.

    The axis is in milliseconds, or in seconds where a step takes ten or more. Put
    theory first, what was measured below:

        theory = simulate(measured.schedule, costs_of(measured)).timeline
        plot_timelines([theory, measured], path="timelines.png")

    Args:
        timelines: What to draw. Each is called by its title, or its schedule's name.
        path: Where to write the picture.

    Raises:
        ImportError: If Matplotlib is not installed.
        ValueError: If there are none.
    """
    if not timelines:
        raise ValueError(
            "A picture shows at least one timeline. Received none. Give those of a "
            "simulation, a measured step, or both."
        )
    longest = max(timeline.step_time for timeline in timelines)
    return _save(_gantt_charts(timelines, _unit(longest)), path)


def plot_mesh(grid: MemoryGrid, *, path: PathLike | None = None) -> Figure:
    """Draws what each device of a mesh holds: replicas down, stages across.

    Args:
        grid: What they hold, such as `tfgpipe.reports.holdings(model)`.
        path: Where to write the picture.

    Raises:
        ImportError: If Matplotlib is not installed.
    """
    lines = [
        line for row in grid for cell in row for shard in cell for line in shard.lines
    ]
    width = max(map(len, lines)) * DIGIT * LABEL_SIZES[0] / 72 + 2 * ROW
    height = max(len(cell) for row in grid for cell in row) * 3 * ROW * 0.75 + ROW
    figure = _figure(LEFT + width * len(grid[0]) + RIGHT, ABOVE + height * len(grid))
    axes = _axes(figure, bottom=0.1, height=height * len(grid))
    axes.set(xlim=(0, len(grid[0])), ylim=(len(grid), 0))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    axes.set_xticks([k + 0.5 for k in range(len(grid[0]))])
    axes.set_xticklabels([f"stage {k}" for k in range(len(grid[0]))])
    axes.set_yticks([d + 0.5 for d in range(len(grid))])
    axes.set_yticklabels([f"replica {d}" for d in range(len(grid))])
    for d, row in enumerate(grid):
        for k, cell in enumerate(row):
            share = BOX / len(cell)
            for t, shard in enumerate(cell):
                top = d + (1 - BOX) / 2 + t * share
                look = {"facecolor": SERIES[k % len(SERIES)], "alpha": 0.15}
                axes.add_patch(
                    _rectangle(
                        (k + 0.05, top), 0.9, share * 0.95, edgecolor="k", **look
                    )
                )
                axes.text(
                    k + 0.5,
                    top + share * 0.475,
                    "\n".join(shard.lines),
                    ha="center",
                    va="center",
                    fontsize=LABEL_SIZES[0],
                )
    return _save(figure, path)


def plot_memory(simulation: Simulation, *, path: PathLike | None = None) -> Figure:
    """Draws what each device holds over time.

    Args:
        simulation: What to draw. Where its costs hold no bytes, the number of
            microbatches in flight is drawn.
        path: Where to write the picture.

    Raises:
        ImportError: If Matplotlib is not installed.
    """
    timeline, fixed = simulation.timeline, simulation.fixed_bytes
    unit, per_second = _unit(timeline.step_time)
    in_bytes = any(simulation.peak_bytes)
    courses = simulation.memory if in_bytes else timeline.in_flight()
    what = "memory" if in_bytes else "microbatches in flight"
    spelled: Callable[[float], str] = readable_bytes if in_bytes else str
    num_rows, height = len(courses), 1.6 * ROW
    figure = _figure(
        LEFT + NARROWEST + RIGHT, ABOVE + BELOW + LEGEND + num_rows * height
    )
    peaks = [max(held for _, held in course) for course in courses]
    for p, course in enumerate(courses):
        bottom = BELOW + LEGEND + (num_rows - 1 - p) * height
        axes = _axes(figure, bottom=bottom, height=0.85 * height)
        times = [per_second * (time - timeline.start) for time, _ in course]
        times.append(per_second * timeline.step_time)
        held = [value for _, value in course]
        held.append(held[-1])
        axes.fill_between(times, held, step="post", color="#56B4E9", linewidth=0)
        axes.fill_between(
            times, [fixed[p]] * len(times), step="post", color="#999999", linewidth=0
        )
        axes.step(times, held, where="post", color="#0072B2", linewidth=1)
        axes.set_xlim(0, times[-1])
        axes.set_ylim(0, 1.08 * max(peaks))
        axes.set_yticks([])
        axes.set_ylabel(f"device {p}", rotation=0, ha="right", va="center", fontsize=8)
        axes.tick_params(labelbottom=p + 1 == num_rows)
        _write_beside(axes, 0.5, spelled(peaks[p]))
        if p == 0:
            _set_titles(
                axes,
                f"{timeline.title}: {what}",
                describe_schedule(timeline.schedule),
                "peak",
            )
    axes.set_xlabel(f"time in {unit}", fontsize=8)
    handles = [_patch(facecolor="#56B4E9", edgecolor="#0072B2")]
    names = ["activations" if in_bytes else what]
    if any(fixed):
        handles.append(_patch(facecolor="#999999"))
        names.append("weights, gradients, slots")
    _legend(figure, handles, names)
    return _save(figure, path)


def plot_memory_parts(
    parts: Sequence[Mapping[str, float]],
    *,
    capacity: float,
    title: str,
    path: PathLike | None = None,
) -> Figure:
    """Draws what each device is to hold, part by part, beside what it has.

    Args:
        parts: For each device, bytes by the name of the part, eight of them.
        capacity: Bytes that each has.
        title: What to write above.
        path: Where to write the picture.

    Raises:
        ImportError: If Matplotlib is not installed.
    """
    height = ROW * len(parts)
    figure = _figure(LEFT + NARROWEST + RIGHT, ABOVE + height + BELOW + 1.6 * LEGEND)
    axes = _axes(figure, bottom=BELOW + 1.6 * LEGEND, height=height)
    unit = 2**30
    left = [0.0] * len(parts)
    for name, (colour, hatch) in zip(parts[0], PART_STYLES, strict=True):
        sizes = [each[name] / unit for each in parts]
        if not any(sizes):
            continue
        axes.barh(
            range(len(parts)),
            sizes,
            BOX,
            left=left,
            facecolor=colour,
            edgecolor="white",
            hatch=hatch,
            linewidth=0,
            label=name,
        )
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for p, total in enumerate(left):
        _write_beside(axes, 1 - (p + 0.5) / len(parts), f"{total:.1f}")
    axes.axvline(capacity / unit, color="black", linestyle="--", linewidth=1)
    axes.set_xlim(0, 1.05 * max(*left, capacity / unit))
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.set_yticks(range(len(parts)), [f"device {p}" for p in range(len(parts))])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("GiB; dashed: what a device has", fontsize=8)
    _set_titles(axes, title, "memory by part", "GiB")
    handles, names = axes.get_legend_handles_labels()
    _legend(figure, handles, names, columns=4)
    return _save(figure, path)


def plot_bubbles(
    num_devices: int,
    *,
    num_microbatches: Sequence[int] = (),
    path: PathLike | None = None,
) -> Figure:
    """Draws the bubble of each named schedule over the number of microbatches.

    The same model is cut for the same devices, and a backward takes two forwards.
    `interleaved` places two stages on each device, half as long each.

    Args:
        num_devices: P, at least 1.
        num_microbatches: The values of M, each at least P. By default P to 16 P.
        path: Where to write the picture.

    Raises:
        ImportError: If Matplotlib is not installed.
        ValueError: If a schedule needs more microbatches.
    """
    P = num_devices
    Ms = sorted(num_microbatches) or [P * 2**power for power in range(5)]
    figure, axes = _curves()
    for name, (colour, line, marker, size) in LINE_STYLES.items():
        v = 2 if name == "interleaved" else 1
        costs = Costs(forward=1 / v, backward=2 / v)
        bubbles = [
            simulate(
                schedules.make(
                    name, num_stages=v * P, num_microbatches=M, num_devices=P
                ),
                costs,
            ).timeline.bubble
            for M in Ms
        ]
        label = f"{name}, 2 stages a device" if v == 2 else name
        axes.plot(
            Ms,
            [100 * bubble for bubble in bubbles],
            color=colour,
            linestyle=line,
            marker=marker,
            markersize=size,
            label=label,
        )
    _label_microbatch_axis(axes, Ms)
    _set_titles(axes, f"Bubble on {P} devices", "a backward takes two forwards")
    _legend(figure, *axes.get_legend_handles_labels())
    return _save(figure, path)


def plot_gpipe_bubbles(
    num_stages: Sequence[int],
    *,
    num_microbatches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    measured: Sequence[Timeline] = (),
    path: PathLike | None = None,
) -> Figure:
    """Draws GPipe's bubble over M, a curve for each K, and what was measured on them.

    The bubble of equal stages is (K - 1) / (M + K - 1), whatever a backward takes, and
    below 1/5 from M = 4K on (Huang et al. 2019, section 2.3).

    Args:
        num_stages: The values of K.
        num_microbatches: The values of M.
        measured: Steps that were measured, such as `TimelineCallback.timeline`. Each is
            drawn at its own K and M.
        path: Where to write the picture.

    Raises:
        ImportError: If Matplotlib is not installed.
        ValueError: If a step was measured with another K than those drawn.
    """
    strange = {each.schedule.num_stages for each in measured} - set(num_stages)
    if strange:
        raise ValueError(
            "A measured step lies on the curve of its K. Received steps of "
            f"K={min(strange)}, and num_stages={tuple(num_stages)}. Add that K."
        )
    Ms = sorted(num_microbatches)
    figure, axes = _curves()
    for K, colour in zip(num_stages, itertools.cycle(SERIES)):
        bubbles = [100 * (K - 1) / (M + K - 1) for M in Ms]
        axes.plot(Ms, bubbles, color=colour, label=f"K = {K}")
        if Ms[0] <= 4 * K <= Ms[-1]:
            axes.plot(4 * K, 100 * (K - 1) / (5 * K - 1), "|", color=colour, ms=14)
        steps = [each for each in measured if each.schedule.num_stages == K]
        axes.plot(
            [each.schedule.num_microbatches for each in steps],
            [100 * each.bubble for each in steps],
            "o",
            color=colour,
            markeredgecolor="black",
        )
    _label_microbatch_axis(axes, Ms)
    numbers = "curves: (K - 1) / (M + K - 1); strokes across them: M = 4K"
    if measured:
        numbers += "; dots: measured"
    _set_titles(axes, "GPipe's bubble over stages and microbatches", numbers)
    _legend(figure, *axes.get_legend_handles_labels())
    return _save(figure, path)


def plot_peaks(
    peaks: Mapping[str, Mapping[str, float]],
    *,
    title: str = "Peak memory",
    path: PathLike | None = None,
) -> Figure:
    """Draws the most bytes held in several places, in several ways, side by side.

    Args:
        peaks: For each way, such as a choice of `remat`, the bytes of each place, such
            as a stage.
        title: What to call the picture.
        path: Where to write the picture.

    Raises:
        ImportError: If Matplotlib is not installed.
        ValueError: If the ways are not of the same places, or there are none.
    """
    places = list(next(iter(peaks.values()), ()))
    if not places or any(list(held) != places for held in peaks.values()):
        raise ValueError(
            "Bars side by side are of the same places. Received "
            f"{[list(held) for held in peaks.values()]}. Give each way a number for "
            "every place, in one order."
        )
    figure, axes = _curves()
    width = BOX / len(peaks)
    for i, (way, held) in enumerate(peaks.items()):
        lefts = [k - BOX / 2 + i * width for k in range(len(places))]
        heights = [value / 2**20 for value in held.values()]
        colour = SERIES[i % len(SERIES)]
        axes.bar(lefts, heights, 0.94 * width, align="edge", color=colour, label=way)
        for left, height, value in zip(lefts, heights, held.values(), strict=True):
            axes.annotate(
                readable_bytes(value).replace(" ", "\n"),
                (left + 0.47 * width, height),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=LABEL_SIZES[-1],
            )
    axes.set_xticks(range(len(places)), places)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(top=1.1 * axes.get_ylim()[1])
    axes.set_ylabel("MiB", fontsize=8)
    _set_titles(axes, title, "the most that is held at a time")
    _legend(figure, *axes.get_legend_handles_labels())
    return _save(figure, path)


def plot_differences(
    differences: Mapping[str, Mapping[str, float]],
    *,
    tolerance: float,
    title: str = "Gradients, beside those of the unpipelined model",
    path: PathLike | None = None,
) -> Figure:
    """Draws how far numbers are from what they should be, one row for each of them.

    Args:
        differences: For each way, such as a K and an M, the relative difference of each
            name, such as a weight's.
        tolerance: What none is to be above. A line is drawn there.
        title: What to call the picture.
        path: Where to write the picture.

    Raises:
        ImportError: If Matplotlib is not installed.
        ValueError: If there is nothing to draw.
    """
    names = list(dict.fromkeys(name for way in differences.values() for name in way))
    values = [value for way in differences.values() for value in way.values()]
    if not values:
        raise ValueError(
            "A picture shows at least one difference. Received none. Give those of a "
            "weight."
        )
    left = DIGIT * LABEL_SIZES[1] * max(map(len, names)) / 72 + 0.2
    height = 0.55 * ROW * len(names)
    figure = _figure(left + NARROWEST + RIGHT, ABOVE + height + BELOW + LEGEND)
    axes = _axes(figure, bottom=BELOW + LEGEND, height=height, left=left)
    least = min([value for value in values if value > 0], default=tolerance / 10)
    floor = 10 ** math.floor(math.log10(min(least, tolerance / 10)))
    axes.set_xscale("symlog", linthresh=floor, linscale=0.5)
    axes.axvline(tolerance, color="#D55E00", linestyle="--")
    for i, (way, some) in enumerate(differences.items()):
        # Beside one another where they are equal.
        shift = BOX * ((i + 0.5) / len(differences) - 0.5)
        axes.plot(
            list(some.values()),
            [names.index(name) + shift for name in some],
            "o",
            markersize=4,
            color=SERIES[i % len(SERIES)],
            label=way,
        )
    powers = range(round(math.log10(floor)), math.ceil(math.log10(tolerance)) + 1)
    ticks = [10.0**power for power in powers][:: max(1, len(powers) // 8)]
    axes.set_xticks(
        [0, *ticks], ["0", *(f"$10^{{{round(math.log10(x))}}}$" for x in ticks)]
    )
    axes.set_xlim(-floor, 3 * max(tolerance, *values))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=LABEL_SIZES[1])
    axes.tick_params(axis="y", length=0)
    axes.grid(color="#EEEEEE")
    axes.set_axisbelow(True)
    axes.set_xlabel("relative difference", fontsize=8)
    numbers = f"largest {max(values):.1e}; dashed: the tolerance, {tolerance:.0e}"
    _set_titles(axes, title, numbers)
    _legend(figure, *axes.get_legend_handles_labels())
    return _save(figure, path)


def _curves() -> tuple[Figure, Axes]:
    """Returns a figure with axes for curves or bars."""
    figure = _figure(LEFT + NARROWEST + RIGHT, ABOVE + CURVES + BELOW + LEGEND)
    return figure, _axes(figure, bottom=BELOW + LEGEND, height=CURVES)


def _label_microbatch_axis(axes: Axes, Ms: Sequence[int]) -> None:
    """Says what curves of bubbles over microbatches mean."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(Ms, [str(M) for M in Ms])
    axes.set_ylim(bottom=0)
    axes.grid(color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.set_xlabel("microbatches", fontsize=8)
    axes.set_ylabel("bubble, % of the step", fontsize=8)


def _unit(seconds: float) -> tuple[str, float]:
    """Returns the unit of an axis of so many seconds, and how many make a second."""
    return ("ms", 1e3) if seconds < 10 else ("s", 1)


def _gantt_charts(timelines: Sequence[Timeline], scale: tuple[str, float]) -> Figure:
    """Draws timelines one above the other, in a unit of which so many make a second."""
    unit, per_second = scale
    shades = max(rank for t in timelines for rank in _ranks(t.schedule).values()) + 1
    longest = max(timeline.step_time for timeline in timelines)
    width, size = _width(timelines, longest)
    heights = [ROW * timeline.schedule.num_devices for timeline in timelines]
    total = sum(heights) + ABOVE * len(heights) + BELOW + LEGEND
    figure = _figure(LEFT + width + RIGHT, total)
    bottom = total
    for timeline, height in zip(timelines, heights, strict=True):
        bottom -= ABOVE + height
        axes = _axes(figure, bottom=bottom, height=height)
        axes.set_xlim(0, per_second * longest)
        _draw_spans(axes, timeline, per_second, shades)
        _label_spans(axes, timeline, per_second, shades, size, width)
        axes.tick_params(labelbottom=timeline is timelines[-1])
        _set_titles(
            axes,
            timeline.title or timeline.schedule.name,
            f"step time {per_second * timeline.step_time:,.4g} {unit}, "
            f"bubble {timeline.bubble:.1%}, efficiency {timeline.efficiency:.1%}, "
            f"imbalance {timeline.imbalance:.2f}",
            "utilisation",
        )
    axes.set_xlabel(f"time in {unit}", fontsize=8)
    _legend_of_kinds(figure, timelines, shades)
    return figure


def _draw_spans(
    axes: Axes, timeline: Timeline, per_second: float, num_shades: int
) -> None:
    """Draws a row for each device, with a box for each span and its utilisation."""
    num_devices = timeline.schedule.num_devices
    for p, share in enumerate(timeline.utilisation):
        step = (0, per_second * timeline.step_time)
        axes.broken_barh([step], (p - BOX / 2, BOX), **IDLE)
        _write_beside(axes, 1 - (p + 0.5) / num_devices, f"{share:.1%}")
    boxes: dict[tuple[SpanKind, int, int], list[tuple[float, float]]] = {}
    for span in timeline.spans:
        start = per_second * (span.start - timeline.start)
        box = (start, per_second * span.duration)
        boxes.setdefault((span.kind, span.stage, span.device), []).append(box)
    ranks = _ranks(timeline.schedule)
    for (kind, k, p), some in boxes.items():
        axes.broken_barh(
            some,
            (p - BOX / 2, BOX),
            facecolor=_shade(kind, ranks[k], num_shades),
            edgecolor="white",
            linewidth=0.5,
        )
    axes.set_ylim(num_devices - 0.5, -0.5)
    axes.set_yticks(range(num_devices), [f"device {p}" for p in range(num_devices)])
    axes.tick_params(axis="y", length=0)


def _label_spans(
    axes: Axes,
    timeline: Timeline,
    per_second: float,
    num_shades: int,
    size: float,
    inches: float,
) -> None:
    """Writes microbatch numbers into the boxes that have room for them."""
    ranks = _ranks(timeline.schedule)
    points = 72 * inches / axes.get_xlim()[1]  # Of a unit of time.
    for span in timeline.spans:
        text = str(span.microbatch)
        room = points * per_second * span.duration
        if room < DIGIT * size * len(text) + MARGIN:
            continue
        middle = (span.start + span.end) / 2 - timeline.start
        red, green, blue = _shade(span.kind, ranks[span.stage], num_shades)
        dark = 0.21 * red + 0.72 * green + 0.07 * blue < 0.42
        axes.text(
            per_second * middle,
            span.device,
            text,
            ha="center",
            va="center_baseline",
            fontsize=size,
            color="white" if dark else "black",
        )


def _width(timelines: Sequence[Timeline], longest: float) -> tuple[float, float]:
    """Returns the inches across and the size of labels at which most of them fit."""
    most = max(timeline.schedule.num_microbatches for timeline in timelines)
    durations = [span.duration for t in timelines for span in t.spans if span.duration]
    # The lower quartile: a few short boxes may stay without.
    short = sorted(durations)[len(durations) // 4]
    for size in LABEL_SIZES:
        points = (DIGIT * size * len(str(most - 1)) + MARGIN + 1) * longest / short
        if points <= 72 * WIDEST:
            return max(points / 72, NARROWEST), size
    return WIDEST, LABEL_SIZES[-1]


def _ranks(schedule: Schedule) -> dict[int, int]:
    """Returns for each stage how many of its device's stages come before it."""
    place = schedule.placement
    return {k: place[:k].count(p) for k, p in enumerate(place)}


def _shade(kind: SpanKind, rank: int, num_shades: int) -> tuple[float, ...]:
    """Returns the colour of a kind, lighter for later stages of a device."""
    from matplotlib.colors import to_rgb

    white = 0.6 * rank / max(num_shades - 1, 1)
    return tuple(c + white * (1 - c) for c in to_rgb(COLOURS[kind]))


def _legend_of_kinds(
    figure: Figure, timelines: Sequence[Timeline], num_shades: int
) -> None:
    """Says what colours mean: several stages of a device have one shade each."""
    present = {kind for timeline in timelines for kind in timeline.span_kinds()}
    kinds = [kind for kind in KIND_LABELS if kind in present]
    handles: list[Any] = [
        tuple(
            _patch(facecolor=_shade(kind, rank, num_shades))
            for rank in range(num_shades)
        )
        for kind in kinds
    ]
    shades = "dark to light: first to last stage of a device" if num_shades > 1 else ""
    names = [KIND_LABELS[kind][2:] for kind in kinds]
    _legend(figure, [*handles, _patch(**IDLE)], [*names, "idle"], shades)


def _legend(
    figure: Figure,
    handles: Sequence[Any],
    names: Sequence[str],
    title: str = "",
    columns: int | None = None,
) -> None:
    from matplotlib.legend_handler import HandlerTuple

    figure.legend(
        handles,
        names,
        loc="lower center",
        ncols=columns or len(names),
        title=title or None,
        fontsize=8,
        title_fontsize=8,
        frameon=False,
        handlelength=3,
        columnspacing=1.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )


def _set_titles(axes: Axes, title: str, numbers: str, beside: str = "") -> None:
    """Writes a title, numbers under it, and the name of what is beside the rows."""
    for text, x, points, weight in (
        (title, 0, (0, 18), "bold"),
        (numbers, 0, (0, 5), "normal"),
        (beside, 1, (6, 5), "normal"),
    ):
        axes.annotate(
            text,
            xy=(x, 1),
            xycoords="axes fraction",
            xytext=points,
            textcoords="offset points",
            fontsize=10 if weight == "bold" else 8,
            fontweight=weight,
        )


def _write_beside(axes: Axes, height: float, text: str) -> None:
    """Writes a row's number at its right."""
    axes.annotate(
        text,
        xy=(1, height),
        xycoords="axes fraction",
        xytext=(6, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=8,
    )


def _patch(**look: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(**look)


def _rectangle(corner: tuple[float, float], *size: float, **look: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, *size, **look)


def _figure(width: float, height: float) -> Figure:
    """Returns an empty figure of a size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures are drawn with Matplotlib, which is not installed here. Run "
            "`pip install matplotlib`, or print the timeline: as text it is a drawing, "
            "too."
        ) from error
    return Figure(figsize=(width, height))


def _axes(figure: Figure, *, bottom: float, height: float, left: float = LEFT) -> Axes:
    """Adds axes between the margins, at a place given in inches."""
    width, total = figure.get_size_inches()
    place = (left / width, bottom / total)
    axes = figure.add_axes((*place, (width - left - RIGHT) / width, height / total))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def supported_formats() -> tuple[str, ...]:
    """Returns the endings of the files that a picture can be written to.

    Raises:
        ImportError: If Matplotlib is not installed.
    """
    known = _figure(1, 1).canvas.get_supported_filetypes()
    return tuple(f".{name}" for name in sorted(known))


def _save(figure: Figure, path: PathLike | None) -> Figure:
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
