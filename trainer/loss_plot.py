"""The picture of a run's losses: means over steps, validation, baselines."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tfgpipe.report import SERIES
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.progress import report

_PICTURE = "losses.png"
# What a curve is called, and what its losses are in a record of `metrics.jsonl`.
_CURVES = {"training": "loss", "validation": "validation_loss"}
# A curve of more records is drawn as means of several.
_MOST_POINTS = 100
# Curves of more points have no dots.
_MOST_DOTS = 30

Curve = list[tuple[int, float]]


def draw_losses(
    folder: Path,
    records: Iterable[Mapping[str, Any]],
    *,
    baselines: Mapping[str, float],
    title: str,
    unit: str,
) -> None:
    """Draws `losses.png` into a run's folder, and says so.

    A disk that is full costs the picture, and stops nothing.

    Args:
        folder: The run's folder.
        records: Measurements, as `read_metrics` yields them.
        baselines: Validation losses to beat, by name.
        title: Title of the picture.
        unit: The unit that a loss is a mean over, such as a byte.
    """
    found = curves(records)
    if not found:
        return
    if not importlib.util.find_spec("matplotlib"):
        print("No picture of losses: `pip install matplotlib` brings it.", flush=True)
        return
    try:
        store.replace(folder / _PICTURE, _drawn(found, baselines, title, unit))
    except OSError as error:
        report(f"{_PICTURE} could not be written: {error.strerror}.")
    else:
        print(f"\nThe losses are drawn in {folder / _PICTURE}.", flush=True)


def curves(records: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Returns the losses by step, of each curve that has any.

    >>> curves([{"step": 1, "loss": 2.5}, {"step": 1, "validation_loss": 2.0}])
    {'training': [(1, 2.5)], 'validation': [(1, 2.0)]}
    """
    found: dict[str, dict[int, float]] = {name: {} for name in _CURVES}
    for record in records:
        for name, key in _CURVES.items():
            if key in record:
                # The end of a run may measure a step again.
                found[name][record["step"]] = record[key]
    return {name: sorted(losses.items()) for name, losses in found.items() if losses}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanCurve:
    """A curve of means.

    Attributes:
        points: The last step of each window, and the mean in it.
        num_steps: Steps of a window.
    """

    points: Curve
    num_steps: int


def windowed(curve: Curve, *, most: int = _MOST_POINTS) -> MeanCurve:
    """Returns means over windows of as many records each, but for the last.

    >>> windowed([(10, 4.0), (20, 2.0), (30, 1.0), (40, 2.0), (45, 2.5)], most=3)
    MeanCurve(points=[(20, 3.0), (40, 1.5), (45, 2.5)], num_steps=20)

    Args:
        curve: Records, each the mean over the steps since the one before.
        most: Points that there may be.
    """
    size = -(-len(curve) // most)
    windows = [curve[i : i + size] for i in range(0, len(curve), size)]
    steps = [0, *(step for step, _ in curve)]
    distance = statistics.mode(b - a for a, b in itertools.pairwise(steps))
    return MeanCurve(
        points=[(w[-1][0], statistics.fmean(loss for _, loss in w)) for w in windows],
        num_steps=size * distance,
    )


def _drawn(
    found: Mapping[str, Curve],
    baselines: Mapping[str, float],
    title: str,
    unit: str,
) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#EEEEEE")
    axes.set_axisbelow(True)
    colours = itertools.cycle(SERIES)
    for name, curve in found.items():
        points, what = curve, name
        if name == "training":
            means = windowed(curve)
            points, what = means.points, f"{name}, means of {means.num_steps} steps"
        steps, losses = zip(*points, strict=True)
        has_dots = name == "validation" or len(steps) <= _MOST_DOTS
        axes.plot(
            steps,
            losses,
            color=next(colours),
            marker="o" if has_dots else "",
            markersize=4,
            linewidth=1.4,
            label=f"{what}, {losses[-1]:.3f} at the end",
        )
    for name, loss in baselines.items():
        axes.axhline(
            loss,
            color=next(colours),
            linestyle="--",
            linewidth=1.2,
            label=f"{name}, {loss:.3f}",
        )
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(f"loss, nats/{unit}", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8, frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()
