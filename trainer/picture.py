"""A picture of a run: its losses over steps, beside those that it should beat."""

from __future__ import annotations

import importlib.util
import io
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tfgpipe.report import SERIES
from trainer import archive
from trainer.progress import tell

_NAME = "losses.png"
# What a curve is called, and what its losses are in a record of `metrics.jsonl`.
_CURVES = {"training": "loss", "validation": "validation_loss"}
# Curves of more points have no dots.
_MOST_DOTS = 30

Curve = list[tuple[int, float]]


def draw(
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
        records: What was measured, as `trainer.metrics.read` yields it.
        baselines: Validation losses to beat, by name.
        title: What to call the picture.
        unit: What a loss is of, such as a byte.
    """
    found = curves(records)
    if not found:
        return
    if not importlib.util.find_spec("matplotlib"):
        print("No picture of losses: `pip install matplotlib` brings it.", flush=True)
        return
    try:
        archive.replace(folder / _NAME, _drawn(found, baselines, title, unit))
    except OSError as error:
        tell(f"{_NAME} could not be written: {error.strerror}.")
    else:
        print(f"\nThe losses are drawn in {folder / _NAME}.", flush=True)


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
        steps, losses = zip(*curve, strict=True)
        axes.plot(
            steps,
            losses,
            color=next(colours),
            marker="o" if len(steps) <= _MOST_DOTS else "",
            markersize=4,
            linewidth=1.4,
            label=f"{name}, {losses[-1]:.3f} at the end",
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
