"""What one sees of a run: a live line, `metrics.jsonl`, curves of TensorBoard."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import importlib.util
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from tfgpipe_trainer.checkpoint import store

if TYPE_CHECKING:
    from rich.live import Live


# Characters of the bar in the live line.
_BAR = 12
# Seconds from one state of the live line to the next.
_REFRESH = 0.1


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
        tokens_per_second: Rate of training, in `unit`s.
        seconds_left: Time until the last step.
        unit: The unit that a loss is a mean over, such as a byte.
        memory: Memory in use, such as `"GPU:1 3.4 GiB"`; empty: not known.
    """

    step: int
    num_steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float
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
            f"{self.tokens_per_second:,.0f} {self.unit}s/s",
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


class Metrics:
    """Writes the measurements of a run.

    A disk that is full costs measurements, and stops nothing: it is reported once.

    Args:
        folder: The run's folder.
        step: The step that the run goes on from. What an earlier start has measured
            after it, and at the end, is dropped: it will be measured anew.
        text: The hyperparameters, which TensorBoard shows.
        name: The stem of the files' names.
    """

    def __init__(
        self, folder: Path, *, step: int, text: str = "", name: str = "metrics"
    ) -> None:
        self._path = folder / f"{name}.jsonl"
        self._reported = False
        before = [
            record for record in read_metrics(self._path) if record["step"] <= step
        ]
        # The end of this step is drawn already, as nothing takes a point away.
        self._drawn = {record["step"] for record in before if record.get("final")}
        kept = [_to_line(record) for record in before if not record.get("final")]
        self._trying(lambda: store.replace(self._path, "".join(kept)))
        self._curves: Curves | None = None
        if importlib.util.find_spec("tensorboard"):
            self._trying(
                lambda: self._begin_curves(folder / "curves" / name, step, text)
            )
        else:
            print("No TensorBoard curves: `pip install tensorboard` brings them.")

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields the records until now."""
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
            step: Number of steps done.
            values: The values, by name.
            final: True for the end of the run, which may be reached again.
        """
        record: dict[str, Any] = {"step": step, **values}
        if final:
            record["final"] = True
        self._trying(lambda: self._append(_to_line(record)))
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
            if not self._reported:
                reason = str(error).partition("\n")[0]
                report(
                    f"Measurements could not be written: {reason}. Training goes on."
                )
            self._reported = True


class Curves:
    """The file that TensorBoard draws a run's measurements from: TFRecords of events.

    Each start of a run writes one. It begins with the step from which on what earlier
    starts have written is to be forgotten (`purge_step` of the writers of TensorFlow 1,
    which those of TensorFlow 2 lack).

    Args:
        folder: The folder of the files.
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


def _to_line(record: Mapping[str, Any]) -> str:
    """Returns a record as JSON, which has no numbers that are not finite."""
    finite = {n: v if math.isfinite(v) else None for n, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields records, without lines that were torn, or are no records.

    A number that was not finite is NaN.

    Raises:
        OSError: If it cannot be read, or is a device, which may have no end.
    """
    if path.exists():
        if not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, "Not a file", str(path))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if _is_record(record):
                    yield {n: math.nan if v is None else v for n, v in record.items()}


def _is_record(record: Any) -> bool:
    """Returns whether this is numbers by name, and a step among them."""
    return (
        isinstance(record, dict)
        and type(record.get("step")) is int
        and all(isinstance(value, int | float | None) for value in record.values())
    )
