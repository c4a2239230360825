"""What one sees of a run: a live line, or plain lines, a picture of its losses."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import io
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from tfgpipe_trainer.checkpoint import store

if TYPE_CHECKING:
    from rich.live import Live


# Characters of the bar in the live line.
_BAR = 12
# Seconds from one state of the live line to the next.
_REFRESH = 0.1
_PICTURE = "losses.png"
# By name of a curve, its losses in a record of `metrics.jsonl`.
_CURVES = {"training": "loss", "validation": "validation_loss"}
# A curve of more records is drawn as means of several.
_MOST_POINTS = 100

Curve = list[tuple[int, float]]


def report(text: str) -> None:
    """Prints a problem on stderr, which may be closed."""
    with contextlib.suppress(OSError):
        print(f"\n{text}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """The run after `step` of `num_steps` steps.

    Attributes:
        step: The step, counted from 1.
        num_steps: Steps of the run.
        loss: The loss to show.
        metrics: Other metrics to show, by name.
        learning_rate: Learning rate of the step.
        throughput: Rate of training, in `unit`s.
        seconds_left: Time until the last step.
        unit: The unit that a loss is a mean over, such as a byte.
        memory: Memory in use, such as `"GPU:1 3.4 GiB"`; empty: not known.
    """

    step: int
    num_steps: int
    loss: float
    learning_rate: float
    throughput: float
    seconds_left: float
    unit: str
    memory: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self._joined(f"learning rate {self.learning_rate:.2e}")

    @property
    def short(self) -> str:
        """The live line: all but the learning rate."""
        return self._joined()

    def _joined(self, *more: str) -> str:
        left = datetime.timedelta(seconds=round(self.seconds_left))
        parts = (
            f"step {self.step:{len(str(self.num_steps))}}/{self.num_steps}",
            f"loss {self.loss:.4f}",
            *(f"{name} {value:.4f}" for name, value in self.metrics.items()),
            *more,
            f"{self.throughput:,.0f} {self.unit}s/s",
            f"{left} left",
            self.memory,
        )
        return "  ".join(filter(None, parts))


class Progress:
    """Shows measurements on a stream: a terminal has a live line, all else plain lines.

    What is printed on stdout meanwhile appears above the live line. The cursor stays
    visible and nothing of the terminal's settings is changed, so a process that is
    killed leaves it as it was. Use as a context: at its end the line stays as it is.

    Args:
        stream: The stream to write to.
        seconds: Seconds between plain lines.

    Attributes:
        is_live: True if there is a live line.
    """

    def __init__(self, stream: TextIO, *, seconds: float = 0.0) -> None:
        self._stream = stream
        is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        self.is_live = stream.isatty() and not is_dumb
        self._seconds = _REFRESH if self.is_live else seconds
        self._live: Live | None = None
        self._shown_at = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def is_due(self) -> bool:
        """True if the last line is old enough for another, or to be replaced."""
        return time.monotonic() >= self._shown_at + self._seconds

    def show(self, measurement: Measurement) -> None:
        """Replaces the live line, or writes one."""
        self._shown_at = time.monotonic()
        if not self.is_live:
            print(measurement, file=self._stream, flush=True)
            return
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1))
        line.add_row(
            ProgressBar(measurement.num_steps, measurement.step, width=_BAR),
            Text(measurement.short, no_wrap=True, overflow="crop"),
        )
        if self._live is None:
            self._live = self._started()
        self._live.update(line, refresh=True)

    def _started(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        live = Live(
            console=Console(file=self._stream),
            # No thread draws: processes are forked, and a line is drawn after steps.
            auto_refresh=False,
            # Others overwrite the line that the cursor is in, as of stages traced.
            redirect_stderr=False,
        )
        live.start()
        # A process that is killed would leave it hidden.
        live.console.show_cursor(True)
        return live


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
        store.atomic_write(folder / _PICTURE, _drawn(found, baselines, title, unit))
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

    from tfgpipe.report import SERIES

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
