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
from tfgpipe.schedules import ActionKind, Schedule, kinds
from tfgpipe.simulation import (
    Costs,
    Simulation,
    Timeline,
    describe_schedule,
    simulate,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PathLike = str | os.PathLike[str]

# Of curves: colour, marker with line, size of the marker. 1F1B lies on GPipe.
LINE_STYLES: dict[schedules.SchedulePolicy, tuple[str, str, int]] = {
    schedules.gpipe: ("#0072B2", "o-", 10),
    schedules.one_f_one_b: ("#E69F00", "s--", 5),
    schedules.interleaved: ("#009E73", "^-", 6),
    schedules.find("zero_bubble"): ("#CC79A7", "D-", 5),
}
# Of parts of memory; the last, which is black, is hatched.
PART_COLOURS = (
    *("#0072B2", "#56B4E9", "#999999", "#009E73"),
    *("#E69F00", "#D55E00", "#CC79A7", "#000000"),
)
# Of whatever comes in a series.
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
IDLE: dict[str, Any] = {"fc": "#FFFFFF", "ec": "#BBBBBB", "hatch": "////", "lw": 0}

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
        schedule: The schedule to draw.
        costs: Costs of its actions. By default a backward takes two forwards.
        path: File to write the picture to.

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
        return _gantt_charts([timeline], "forwards", 1).save(path)
    return plot_timelines([timeline], path=path)


def plot_timelines(
    timelines: Sequence[Timeline], *, path: PathLike | None = None
) -> Figure:
    """Draws timelines one above the other, on one axis of time, with their metrics.

    The axis is in milliseconds, or in seconds where a step takes ten or more. Put
    theory first, what was measured below:

        theory = simulate(measured.schedule, costs_of(measured)).timeline
        plot_timelines([theory, measured], path="timelines.png")

    Args:
        timelines: Timelines, each called by its title, or its schedule's name.
        path: File to write the picture to.

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
    return _gantt_charts(timelines, *_unit(longest)).save(path)


def plot_mesh(grid: MemoryGrid, *, path: PathLike | None = None) -> Figure:
    """Draws the memory of each device of a mesh: replicas down, stages across.

    Args:
        grid: Their memory, as of `tfgpipe.report.device_memory`.
        path: File to write the picture to.

    Raises:
        ImportError: If Matplotlib is not installed.
    """
    D, K, size = len(grid), len(grid[0]), LABEL_SIZES[0]
    cells = [(d, k, grid[d][k]) for d in range(D) for k in range(K)]
    longest = max(len(line) for *_, cell in cells for x in cell for line in x.lines)
    width = longest * DIGIT * size / 72 + 2 * ROW
    height = max(len(cell) for *_, cell in cells) * 3 * ROW * 0.75 + ROW
    picture = _Picture([height * D], width=width * K, legend=0.1 - BELOW)
    (axes,) = picture.axes
    _name_rows(axes, [f"replica {d}" for d in range(D)])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    axes.set_xlim(-0.5, K - 0.5)
    axes.set_xticks(range(K), [f"stage {k}" for k in range(K)])
    for d, k, cell in cells:
        share = BOX / len(cell)
        look: dict[str, Any] = {"fc": SERIES[k % len(SERIES)], "alpha": 0.15, "ec": "k"}
        for t, shard in enumerate(cell):
            top = d + (t - len(cell) / 2) * share
            axes.bar(k, 0.95 * share, 0.9, top, **look)
            middle, text = top + 0.475 * share, "\n".join(shard.lines)
            axes.text(k, middle, text, ha="center", va="center", fontsize=size)
    return picture.save(path)


def plot_memory(simulation: Simulation, *, path: PathLike | None = None) -> Figure:
    """Draws the memory of each device over time.

    Args:
        simulation: The simulation to draw. Where its costs hold no bytes, the number of
            microbatches in flight is drawn.
        path: File to write the picture to.

    Raises:
        ImportError: If Matplotlib is not installed.
    """
    timeline, fixed = simulation.timeline, simulation.fixed_bytes
    unit, per_second = _unit(timeline.step_time)
    in_bytes = any(simulation.peak_bytes)
    courses = simulation.memory if in_bytes else timeline.in_flight()
    what = "memory" if in_bytes else "microbatches in flight"
    spelled: Callable[[float], str] = readable_bytes if in_bytes else str
    picture = _Picture([1.36 * ROW] * len(courses), gap=0.24 * ROW)
    peaks = [max(held for _, held in course) for course in courses]
    for p, (axes, course) in enumerate(zip(picture.axes, courses, strict=True)):
        times, held = zip(*course, (timeline.end, course[-1][1]), strict=True)
        times = tuple(per_second * (time - timeline.start) for time in times)
        name = "activations" if in_bytes else what
        axes.fill_between(times, held, step="post", fc="#56B4E9", lw=0, label=name)
        if any(fixed):
            name = "weights, gradients, slots"
            axes.fill_between(times, fixed[p], fc="#999999", lw=0, label=name)
        axes.step(times, held, where="post", color="#0072B2", linewidth=1)
        axes.set_xlim(0, times[-1])
        axes.set_ylim(0, 1.08 * max(peaks))
        axes.set_yticks([])
        axes.set_ylabel(f"device {p}", rotation=0, ha="right", va="center", fontsize=8)
        _write_beside(axes, 0.5, spelled(peaks[p]))
    key = describe_schedule(timeline.schedule)
    picture.set_titles(f"{timeline.title}: {what}", key, "peak")
    picture.add_legend(xlabel=f"time in {unit}")
    return picture.save(path)


def plot_memory_parts(
    parts: Sequence[Mapping[str, float]],
    *,
    capacities: Sequence[float],
    title: str,
    path: PathLike | None = None,
) -> Figure:
    """Draws the memory that each device needs, part by part, beside what it has.

    Args:
        parts: For each device, bytes by the name of the part, eight of them.
        capacities: Bytes that each has.
        title: Title of the picture.
        path: File to write the picture to.

    Raises:
        ImportError: If Matplotlib is not installed.
    """
    picture = _Picture([ROW * len(parts)], legend=1.6 * LEGEND)
    (axes,) = picture.axes
    unit, rows = 2**30, range(len(parts))
    left = [0.0] * len(parts)
    for name, colour in zip(parts[0], PART_COLOURS, strict=True):
        sizes = [each[name] / unit for each in parts]
        if not any(sizes):
            continue
        hatch = "///" if colour == PART_COLOURS[-1] else ""
        bars = axes.barh(rows, sizes, BOX, left=left, label=name, fc=colour, lw=0)
        for bar in bars:
            bar.set(edgecolor="white", hatch=hatch)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for p, total in enumerate(left):
        _write_beside(axes, 1 - (p + 0.5) / len(parts), f"{total:.1f}")
    most = [size / unit for size in capacities]
    edges = [p + side for p in rows for side in (-0.5, 0.5)]
    limits = [size for size in most for _ in range(2)]
    axes.plot(limits, edges, color="black", linestyle="--", linewidth=1)
    axes.set_xlim(0, 1.05 * max(*left, *most))
    _name_rows(axes, [f"device {p}" for p in rows])
    picture.set_titles(title, "memory by part", "GiB")
    picture.add_legend(columns=4, xlabel="GiB; dashed: what a device has")
    return picture.save(path)


def plot_bubbles(
    num_devices: int,
    *,
    num_microbatches: Sequence[int] = (),
    path: PathLike | None = None,
) -> Figure:
    """Draws the bubble of each named schedule over the number of microbatches.

    One model is partitioned for all; a backward takes two forwards. `interleaved` has
    two stages on each device, half as long each.

    Args:
        num_devices: P, at least 1.
        num_microbatches: The values of M, each at least P. By default P to 16 P.
        path: File to write the picture to.

    Raises:
        ImportError: If Matplotlib is not installed.
        ValueError: If a schedule needs more microbatches.
    """
    P = num_devices
    Ms = sorted(num_microbatches) or [P * 2**power for power in range(5)]
    picture = _Picture([CURVES])
    (axes,) = picture.axes
    for policy, (colour, line, size) in LINE_STYLES.items():
        v = min(policy.stages_per_device)
        costs = Costs(forward=1 / v, backward=2 / v)
        plans = (policy(v * P, M, num_devices=P) for M in Ms)
        bubbles = [100 * simulate(plan, costs).timeline.bubble for plan in plans]
        label = f"{policy.name}, {v} stages a device" if v > 1 else policy.name
        axes.plot(Ms, bubbles, line, color=colour, markersize=size, label=label)
    picture.set_titles(f"Bubble on {P} devices", "a backward takes two forwards")
    return _finish_bubbles(picture, Ms).save(path)


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
        path: File to write the picture to.

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
    picture = _Picture([CURVES])
    (axes,) = picture.axes
    for K, colour in zip(num_stages, itertools.cycle(SERIES)):
        bubbles = [100 * (K - 1) / (M + K - 1) for M in Ms]
        axes.plot(Ms, bubbles, color=colour, label=f"K = {K}")
        if Ms[0] <= 4 * K <= Ms[-1]:
            axes.plot(4 * K, 100 * (K - 1) / (5 * K - 1), "|", color=colour, ms=14)
        for step in (each for each in measured if each.schedule.num_stages == K):
            M, bubble = step.schedule.num_microbatches, 100 * step.bubble
            axes.plot(M, bubble, "o", color=colour, markeredgecolor="black")
    key = "curves: (K - 1) / (M + K - 1); strokes across them: M = 4K"
    if measured:
        key += "; dots: measured"
    picture.set_titles("GPipe's bubble over stages and microbatches", key)
    return _finish_bubbles(picture, Ms).save(path)


def plot_peaks(
    peaks: Mapping[str, Mapping[str, float]],
    *,
    title: str = "Peak memory",
    path: PathLike | None = None,
) -> Figure:
    """Draws peak memory as bars, side by side for several ways to run.

    Args:
        peaks: For each way to run, such as a choice of `remat`, bytes by name, such as
            that of a stage.
        title: Title of the picture.
        path: File to write the picture to.

    Raises:
        ImportError: If Matplotlib is not installed.
        ValueError: If not all have the same names, or there are none.
    """
    names = list(next(iter(peaks.values()), ()))
    if not names or any(list(held) != names for held in peaks.values()):
        raise ValueError(
            "Bars side by side have the same names. Received "
            f"{[list(held) for held in peaks.values()]}. Give each way to run a value "
            "for every name, in one order."
        )
    picture = _Picture([CURVES])
    (axes,) = picture.axes
    width = BOX / len(peaks)
    for i, (way, held) in enumerate(peaks.items()):
        lefts = [k - BOX / 2 + i * width for k in range(len(names))]
        heights = [value / 2**20 for value in held.values()]
        colour = SERIES[i % len(SERIES)]
        bars = axes.bar(lefts, heights, 0.94 * width, align="edge", color=colour)
        bars.set_label(way)
        labels = [readable_bytes(value).replace(" ", "\n") for value in held.values()]
        axes.bar_label(bars, labels, padding=2, fontsize=LABEL_SIZES[-1])
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(top=1.1 * axes.get_ylim()[1])
    axes.set_ylabel("MiB", fontsize=8)
    picture.set_titles(title, "the most that is held at a time")
    picture.add_legend()
    return picture.save(path)


def plot_differences(
    differences: Mapping[str, Mapping[str, float]],
    *,
    tolerance: float,
    title: str = "Gradients, beside those of the unpipelined model",
    path: PathLike | None = None,
) -> Figure:
    """Draws relative differences from expected values, a row for each name.

    Args:
        differences: For each way, such as a K and an M, the relative difference of each
            name, such as a weight's.
        tolerance: The largest difference that is right. A line is drawn there.
        title: Title of the picture.
        path: File to write the picture to.

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
    picture = _Picture([0.55 * ROW * len(names)], left=left)
    (axes,) = picture.axes
    least = min([value for value in values if value > 0], default=tolerance / 10)
    floor = 10 ** math.floor(math.log10(min(least, tolerance / 10)))
    axes.set_xscale("symlog", linthresh=floor, linscale=0.5)
    axes.axvline(tolerance, color="#D55E00", linestyle="--")
    for i, (way, some) in enumerate(differences.items()):
        # Beside one another where they are equal.
        shift = BOX * ((i + 0.5) / len(differences) - 0.5)
        heights = [names.index(name) + shift for name in some]
        colour = SERIES[i % len(SERIES)]
        axes.plot(list(some.values()), heights, "o", ms=4, color=colour, label=way)
    powers = range(round(math.log10(floor)), math.ceil(math.log10(tolerance)) + 1)
    powers = powers[:: max(1, len(powers) // 8)]
    ticks = {0.0: "0", **{10.0**x: f"$10^{{{x}}}$" for x in powers}}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlim(-floor, 3 * max(tolerance, *values))
    _name_rows(axes, names, LABEL_SIZES[1])
    axes.grid(color="#EEEEEE")
    axes.set_axisbelow(True)
    key = f"largest {max(values):.1e}; dashed: the tolerance, {tolerance:.0e}"
    picture.set_titles(title, key)
    picture.add_legend(xlabel="relative difference")
    return picture.save(path)


def _finish_bubbles(picture: _Picture, Ms: Sequence[int]) -> _Picture:
    """Labels the axes of bubbles over microbatches."""
    (axes,) = picture.axes
    axes.set_xscale("log", base=2)
    axes.set_xticks(Ms, [str(M) for M in Ms])
    axes.set_ylim(bottom=0)
    axes.grid(color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.set_ylabel("bubble, % of the step", fontsize=8)
    picture.add_legend(xlabel="microbatches")
    return picture


def _unit(seconds: float) -> tuple[str, float]:
    """Returns the unit of an axis of so many seconds, and how many make a second."""
    return ("ms", 1e3) if seconds < 10 else ("s", 1)


def _gantt_charts(
    timelines: Sequence[Timeline], unit: str, per_second: float
) -> _Picture:
    """Draws timelines one above the other, in a unit of which so many make a second."""
    shades = max(rank for t in timelines for rank in _ranks(t.schedule).values()) + 1
    longest = max(timeline.step_time for timeline in timelines)
    width, size = _width(timelines, longest)
    heights = [ROW * timeline.schedule.num_devices for timeline in timelines]
    picture = _Picture(heights, width=width, gap=ABOVE)
    for axes, timeline in zip(picture.axes, timelines, strict=True):
        axes.set_xlim(0, per_second * longest)
        _draw_spans(axes, timeline, per_second, shades, size, width)
        picture.set_titles(
            timeline.title or timeline.schedule.name,
            f"step time {per_second * timeline.step_time:,.4g} {unit}, "
            f"bubble {timeline.bubble:.1%}, efficiency {timeline.efficiency:.1%}, "
            f"imbalance {timeline.imbalance:.2f}",
            "utilisation",
            axes=axes,
        )
    picture.add_legend(
        _legend_of_kinds(timelines, shades),
        title="dark to light: first to last stage of a device" * (shades > 1),
        xlabel=f"time in {unit}",
    )
    return picture


def _draw_spans(
    axes: Axes,
    timeline: Timeline,
    per_second: float,
    num_shades: int,
    size: float,
    inches: float,
) -> None:
    """Draws a row for each device: its spans as boxes, and its utilisation.

    Microbatch indices are written into the boxes that have room for them.
    """
    num_devices, ranks = timeline.schedule.num_devices, _ranks(timeline.schedule)
    for p, share in enumerate(timeline.utilisation):
        step = (0, per_second * timeline.step_time)
        axes.broken_barh([step], (p - BOX / 2, BOX), **IDLE)
        _write_beside(axes, 1 - (p + 0.5) / num_devices, f"{share:.1%}")
    # One collection for the boxes of a kind, of which there may be thousands.
    boxes: dict[tuple[ActionKind, int, int], list[tuple[float, float]]] = {}
    points = 72 * inches / axes.get_xlim()[1]  # Of a unit of time.
    for span in timeline.spans:
        start = per_second * (span.start - timeline.start)
        duration = per_second * span.duration
        key = span.kind, span.stage, span.device
        boxes.setdefault(key, []).append((start, duration))
        text = str(span.microbatch)
        if span.kind.is_copy or points * duration < DIGIT * size * len(text) + MARGIN:
            continue
        red, green, blue = _shade(span.kind, ranks[span.stage], num_shades)
        dark = 0.21 * red + 0.72 * green + 0.07 * blue < 0.42
        axes.text(
            start + duration / 2,
            span.device,
            text,
            ha="center",
            va="center_baseline",
            fontsize=size,
            color="white" if dark else "black",
        )
    for (kind, k, p), some in boxes.items():
        colour, rows = _shade(kind, ranks[k], num_shades), (p - BOX / 2, BOX)
        if kind.is_copy:  # Beside the boxes of the device's work.
            rows = (p - 0.5 if kind.is_backward else p + BOX / 2, (1 - BOX) / 2)
        axes.broken_barh(some, rows, fc=colour, ec="white", lw=0.5)
    _name_rows(axes, [f"device {p}" for p in range(num_devices)])


def _width(timelines: Sequence[Timeline], longest: float) -> tuple[float, float]:
    """Returns the inches across and the size of labels at which most of them fit."""
    most = max(timeline.schedule.num_microbatches for timeline in timelines)
    durations = [span.duration for t in timelines for span in t.spans if span.duration]
    # A few short boxes of a measured step may stay without.
    short = sorted(durations)[len(durations) // 20]
    for size in LABEL_SIZES:
        points = (DIGIT * size * len(str(most - 1)) + MARGIN + 1) * longest / short
        if points <= 72 * WIDEST:
            return max(points / 72, NARROWEST), size
    return WIDEST, LABEL_SIZES[-1]


def _ranks(schedule: Schedule) -> dict[int, int]:
    """Returns for each stage how many of its device's stages come before it."""
    placement = schedule.placement
    return {k: placement[:k].count(p) for k, p in enumerate(placement)}


def _shade(kind: ActionKind, rank: int, num_shades: int) -> tuple[float, ...]:
    """Returns the colour of a kind, lighter for later stages of a device."""
    from matplotlib.colors import to_rgb

    white = 0.6 * rank / max(num_shades - 1, 1)
    return tuple(c + white * (1 - c) for c in to_rgb(kind.color))


def _legend_of_kinds(
    timelines: Sequence[Timeline], num_shades: int
) -> list[tuple[Any, str]]:
    """Returns a patch for each kind, in a shade for each stage of a device."""
    from matplotlib.patches import Patch

    present = (kind for timeline in timelines for kind in timeline.span_kinds())
    entries: dict[str, Any] = {
        x.label: tuple(Patch(fc=_shade(x, r, num_shades)) for r in range(num_shades))
        for x in kinds.sort(present)
    }
    entries["idle"] = Patch(**IDLE)
    return [(patches, label) for label, patches in entries.items()]


class _Picture:
    """A figure of axes one above the other, with room for titles and a legend.

    Args:
        heights: Inches of each axes, from the top.
        width: Inches of all.
        left: Inches at their left.
        legend: Inches below them, beside those of their labels.
        gap: Inches between two.
    """

    def __init__(
        self,
        heights: Sequence[float],
        *,
        width: float = NARROWEST,
        left: float = LEFT,
        legend: float = LEGEND,
        gap: float = 0.0,
    ) -> None:
        inside = sum(heights) + gap * (len(heights) - 1)
        total, whole = ABOVE + inside + BELOW + legend, left + width + RIGHT
        self.figure = _figure(whole, total)
        self.axes: list[Axes] = []
        bottom = total - ABOVE
        for i, height in enumerate(heights):
            bottom -= height + (gap if i else 0.0)
            place = left / whole, bottom / total, width / whole, height / total
            axes = self.figure.add_axes(place)
            axes.tick_params(labelsize=8, labelbottom=i + 1 == len(heights))
            axes.spines[["top", "right"]].set_visible(False)
            self.axes.append(axes)

    def set_titles(
        self, title: str, figures: str, beside: str = "", *, axes: Axes | None = None
    ) -> None:
        """Writes a title, figures under it, and the name of what is beside the rows."""
        axes = axes or self.axes[0]
        _annotate(axes, title, (0, 1), (0, 18), fontsize=10, fontweight="bold")
        _annotate(axes, figures, (0, 1), (0, 5))
        _annotate(axes, beside, (1, 1), (6, 5))

    def add_legend(
        self,
        entries: Sequence[tuple[Any, str]] = (),
        *,
        title: str = "",
        columns: int | None = None,
        xlabel: str = "",
    ) -> None:
        """Adds a legend, by default of what has a label in the last axes."""
        from matplotlib.legend_handler import HandlerTuple

        axes = self.axes[-1]
        axes.set_xlabel(xlabel, fontsize=8)
        labelled = zip(*axes.get_legend_handles_labels(), strict=True)
        handles, names = zip(*(entries or labelled), strict=True)
        self.figure.legend(
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

    def save(self, path: PathLike | None) -> Figure:
        """Returns the figure, written to a file if one is named."""
        if path is not None:
            self.figure.savefig(path, dpi=150)
        return self.figure


def _write_beside(axes: Axes, height: float, text: str) -> None:
    """Writes a row's number at its right."""
    _annotate(axes, text, (1, height), (6, 0), va="center_baseline")


def _annotate(
    axes: Axes,
    text: str,
    corner: tuple[float, float],
    points: tuple[float, float],
    **look: Any,
) -> None:
    """Writes a text some points from a corner, which is a fraction of the axes."""
    axes.annotate(
        text,
        corner,
        points,
        "axes fraction",
        "offset points",
        **{"fontsize": 8, **look},
    )


def _name_rows(axes: Axes, names: Sequence[str], fontsize: float = 8) -> None:
    """Has axes show a row for each name, the first at the top."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=fontsize)
    axes.tick_params(axis="y", length=0)


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


def supported_formats() -> tuple[str, ...]:
    """Returns the endings of the files that a picture can be written to.

    Raises:
        ImportError: If Matplotlib is not installed.
    """
    known = _figure(1, 1).canvas.get_supported_filetypes()
    return tuple(f".{name}" for name in sorted(known))
