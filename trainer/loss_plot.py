"""The picture of a run's losses: training, validation, baselines."""

from __future__ import annotations

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
# By name of a curve, its losses in a record of `metrics.jsonl`.
_CURVES = {"training": "loss", "validation": "validation_loss"}
# A curve of more records is drawn as means of several.
_MOST_POINTS = 100

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


def means(curve: Curve, *, most: int = _MOST_POINTS) -> Curve:
    """Returns means over as many records each, but for the last, by last step.

    >>> means([(10, 4.0), (20, 2.0), (30, 1.0), (40, 2.0), (45, 2.5)], most=3)
    [(20, 3.0), (40, 1.5), (45, 2.5)]
    """
    size = -(-len(curve) // most)
    parts = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [(each[-1][0], statistics.fmean(x for _, x in each)) for each in parts]


def _drawn(
    found: Mapping[str, Curve], baselines: Mapping[str, float], title: str, unit: str
) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#EEEEEE")
    colours = itertools.cycle(SERIES)
    for name, curve in found.items():
        steps, losses = zip(*means(curve), strict=True)
        label = f"{name}, {losses[-1]:.3f} at the end"
        marker = "o" if len(steps) < _MOST_POINTS / 3 else ""
        axes.plot(steps, losses, marker, ls="-", color=next(colours), label=label)
    for name, loss in baselines.items():
        label = f"{name}, {loss:.3f}"
        axes.axhline(loss, color=next(colours), linestyle="--", label=label)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats/{unit}")
    axes.legend(frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()
