"""What one sees of a run: a bar or lines, `metrics.jsonl`, TensorBoard, a picture."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import io
import itertools
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tfgpipe.report import SERIES
from trainer.checkpoint import store

if TYPE_CHECKING:
    pass


_BAR = 12


def tell(text: str) -> None:
    """Tells what went wrong on the way, on stderr; somebody need not be there."""
    with contextlib.suppress(OSError):
        print(f"\n{text}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """The run after `step` of `num_steps` steps."""

    step: int
    num_steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    seconds_left: float
    unit: str

    def __str__(self) -> str:
        left = datetime.timedelta(seconds=round(self.seconds_left))
        return (
            f"step {self.step:{len(str(self.num_steps))}}/{self.num_steps}  "
            f"loss {self.loss:.4f}  learning rate {self.learning_rate:.2e}  "
            f"{self.tokens_per_second:,.0f} {self.unit}s/s  {left} left"
        )


class Progress:
    """Shows measurements on a stream.

    Args:
        stream: A terminal gets a bar that moves, anything else plain lines.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_live = stream.isatty()

    def show(self, measurement: Measurement) -> None:
        """Moves the bar, or writes a line."""
        if not self.is_live:
            print(measurement, file=self._stream, flush=True)
            return
        done = _BAR * measurement.step // measurement.num_steps
        text = f"[{'=' * done:{_BAR}}] {measurement}"
        columns = shutil.get_terminal_size().columns
        end = "\n" if measurement.step == measurement.num_steps else ""
        print(f"\r{text[: columns - 1]}\033[K", end=end, file=self._stream, flush=True)


class Metrics:
    """Writes the measurements of a run.

    A disk that is full costs measurements, and stops nothing: it is told once.

    Args:
        folder: The run's folder.
        step: The step that the run goes on from. What an earlier start has measured
            after it, and at the end, is dropped: it will be measured anew.
        text: The hyperparameters, which TensorBoard shows.
        name: What the files are called.
    """

    def __init__(
        self, folder: Path, *, step: int, text: str = "", name: str = "metrics"
    ) -> None:
        self._path = folder / f"{name}.jsonl"
        self._told = False
        before = [
            record for record in read_metrics(self._path) if record["step"] <= step
        ]
        # The end of this step is drawn already, as nothing takes a point away.
        self._drawn = {record["step"] for record in before if record.get("final")}
        kept = [f"{json.dumps(r)}\n" for r in before if not r.get("final")]
        self._trying(lambda: store.replace(self._path, "".join(kept)))
        self._curves: Curves | None = None
        if importlib.util.find_spec("tensorboard"):
            self._trying(
                lambda: self._begin_curves(folder / "curves" / name, step, text)
            )
        else:
            print("No TensorBoard curves: `pip install tensorboard` brings them.")

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields what was measured until now."""
        return read_metrics(self._path)

    def write_validation(
        self, step: int, values: Mapping[str, float], *, final: bool = False
    ) -> None:
        """Writes what was measured on the validation split: see `write`."""
        named = {f"validation_{name}": value for name, value in values.items()}
        self.write(step, named, final=final)

    def write(
        self, step: int, values: Mapping[str, float], *, final: bool = False
    ) -> None:
        """Writes the values measured after `step` steps.

        Args:
            step: How many steps that are.
            values: The values, by name.
            final: Whether they are of the end of the run, which may be come to again.
        """
        record: dict[str, Any] = {"step": step, **values}
        if final:
            record["final"] = True
        self._trying(lambda: self._append(json.dumps(record) + "\n"))
        curves = self._curves
        if curves and not (final and step in self._drawn):
            self._trying(lambda: curves.write(step, values))

    def _append(self, line: str) -> None:
        with self._path.open("a+b") as file:
            # A line that a full disk has torn stays alone.
            if file.tell() and self._last_byte(file) != b"\n":
                file.write(b"\n")
            file.write(line.encode())
            file.flush()
            # A checkpoint does not outlive a power cut without what came before it.
            os.fsync(file.fileno())

    def _last_byte(self, file: Any) -> bytes:
        file.seek(-1, os.SEEK_END)
        return bytes(file.read(1))

    def _begin_curves(self, folder: Path, step: int, text: str) -> None:
        self._curves = Curves(folder, step=step, text=text)

    def _trying(self, write: Any) -> None:
        import tensorflow as tf

        try:
            write()
        except (OSError, tf.errors.OpError) as error:
            if not self._told:
                reason = str(error).partition("\n")[0]
                tell(f"Measurements could not be written: {reason}. Training goes on.")
            self._told = True


class Curves:
    """The file that TensorBoard draws a run's measurements from: TFRecords of events.

    Each start of a run writes one. It begins with the step from which on what earlier
    starts have written is to be forgotten (`purge_step` of the writers of TensorFlow 1,
    which those of TensorFlow 2 lack).

    Args:
        folder: Where the files are.
        step: The step that the run goes on from.
        text: The hyperparameters, or an empty text.

    Raises:
        OSError: If it cannot be written, or tf.errors.OpError.
    """

    def __init__(self, folder: Path, *, step: int, text: str = "") -> None:
        import tensorflow as tf

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = tf.io.TFRecordWriter(str(_newest_of(folder)))
        self._add(file_version="brain.Event:2")
        for _ in range(2):  # The first that TensorBoard comes across does nothing.
            start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
            self._add(session_log=start, step=step + 1)
        if text:
            block = "\n".join(f"    {line}" for line in text.splitlines())
            value = tf.compat.v1.Summary.Value(
                tag="hyperparameters", tensor=tf.make_tensor_proto(block)
            )
            value.metadata.plugin_data.plugin_name = "text"
            self._add(summary=tf.compat.v1.Summary(value=[value]), step=step)
        self._writer.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        import tensorflow as tf

        points = [
            tf.compat.v1.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        self._add(summary=tf.compat.v1.Summary(value=points), step=step)
        self._writer.flush()

    def _add(self, **event: Any) -> None:
        import tensorflow as tf

        made = tf.compat.v1.Event(wall_time=time.time(), **event)
        self._writer.write(made.SerializeToString())


def _newest_of(folder: Path) -> Path:
    """Returns a name for a file of events after those there, whose order matters."""
    there = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    after = max((int(each) + 1 for each in there if each.isdigit()), default=0)
    seconds = max(int(time.time()), after)
    return folder / f"events.out.tfevents.{seconds:010}.{socket.gethostname()}.v2"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields what was measured, without lines that were torn, or are no records."""
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if _is_record(record):
                    yield record


def _is_record(record: Any) -> bool:
    """Returns whether this is numbers by name, and a step among them."""
    return (
        isinstance(record, dict)
        and type(record.get("step")) is int
        and all(isinstance(value, int | float) for value in record.values())
    )


_PICTURE = "losses.png"
# What a curve is called, and what its losses are in a record of `metrics.jsonl`.
_CURVES = {"training": "loss", "validation": "validation_loss"}
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
        records: What was measured, as `read_metrics` yields it.
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
        store.replace(folder / _PICTURE, _drawn(found, baselines, title, unit))
    except OSError as error:
        tell(f"{_PICTURE} could not be written: {error.strerror}.")
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
