"""Measurements on disk: `metrics.jsonl`, one JSON object a line, and TensorBoard."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer import archive
from trainer.progress import tell


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
        before = [record for record in read(self._path) if record["step"] <= step]
        # The end of this step is drawn already, as nothing takes a point away.
        self._drawn = {record["step"] for record in before if record.get("final")}
        kept = [f"{json.dumps(r)}\n" for r in before if not r.get("final")]
        self._trying(lambda: archive.replace(self._path, "".join(kept)))
        self._curves: Curves | None = None
        if importlib.util.find_spec("tensorboard"):
            self._trying(
                lambda: self._begin_curves(folder / "curves" / name, step, text)
            )
        else:
            print("No TensorBoard curves: `pip install tensorboard` brings them.")

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields what was measured until now."""
        return read(self._path)

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
        points = [
            tf.compat.v1.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        self._add(summary=tf.compat.v1.Summary(value=points), step=step)
        self._writer.flush()

    def _add(self, **event: Any) -> None:
        made = tf.compat.v1.Event(wall_time=time.time(), **event)
        self._writer.write(made.SerializeToString())


def _newest_of(folder: Path) -> Path:
    """Returns a name for a file of events after those there, whose order matters."""
    there = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    after = max((int(each) + 1 for each in there if each.isdigit()), default=0)
    seconds = max(int(time.time()), after)
    return folder / f"events.out.tfevents.{seconds:010}.{socket.gethostname()}.v2"


def read(path: Path) -> Iterator[dict[str, Any]]:
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
