"""Measurements on disk: `metrics.jsonl`, one JSON object a line, and TensorBoard."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf


class Metrics:
    """Writes the measurements of a run.

    Args:
        folder: The run's folder.
        step: The step that the run goes on from. What an earlier start has measured
            after it, and at the end, is dropped: it will be measured anew.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        self._path = folder / "metrics.jsonl"
        kept = [
            line
            for line, record in self._lines()
            if record["step"] <= step and "loss" in record
        ]
        self._path.write_text("".join(kept))
        self._curves = None
        if importlib.util.find_spec("tensorboard"):
            self._curves = tf.summary.create_file_writer(str(folder / "curves"))
        else:
            print("No TensorBoard curves: `pip install tensorboard` brings them.")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the values measured after `step` steps."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._curves:
            with self._curves.as_default():
                for name, value in values.items():
                    tf.summary.scalar(name, value, step)
            self._curves.flush()

    def _lines(self) -> Iterator[tuple[str, dict[str, float]]]:
        if self._path.exists():
            for line in self._path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # The last may be torn.
                    yield line, json.loads(line)
