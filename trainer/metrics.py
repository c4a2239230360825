"""Measurements on disk: `metrics.jsonl`, one JSON object a line, and TensorBoard."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
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
        kept = [
            f"{json.dumps(record)}\n"
            for record in read(self._path)
            if record["step"] <= step and not record.get("final")
        ]
        self._trying(lambda: archive.replace(self._path, "".join(kept)))
        self._curves: Any = None
        if importlib.util.find_spec("tensorboard"):
            self._trying(lambda: self._begin_curves(folder / "curves" / name, text))
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
        if self._curves:
            self._trying(lambda: self._draw(step, values))

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

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        with self._curves.as_default():
            for name, value in values.items():
                tf.summary.scalar(name, value, step)
        self._curves.flush()

    def _begin_curves(self, folder: Path, text: str) -> None:
        self._curves = tf.summary.create_file_writer(str(folder))
        if text:
            block = "\n".join(f"    {line}" for line in text.splitlines())
            with self._curves.as_default():
                tf.summary.text("hyperparameters", block, 0)

    def _trying(self, write: Any) -> None:
        try:
            write()
        except (OSError, tf.errors.OpError) as error:
            if not self._told:
                reason = str(error).partition("\n")[0]
                tell(f"Measurements could not be written: {reason}. Training goes on.")
            self._told = True


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
