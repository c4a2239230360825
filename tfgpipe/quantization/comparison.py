"""How near the file of a model in 8 bits comes to the model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import readable_bytes
from tfgpipe.quantization.interpreter import (
    Interpreter,
    Operations,
    batches,
    operations,
)
from tfgpipe.quantization.plain import inputs_of, plain_copy

_ROWS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outputs of a file in 8 bits beside those of its model.

    Attributes:
        num_outputs: How many numbers were compared.
        num_identical: How many are the same integer.
        largest_difference: The largest difference in steps of the integer (LSB).
        accuracy: Share of labels that the model gives, or None without labels.
        int8_accuracy: Share of labels that the file gives, or None.
        operations: What the file computes with.
        num_bytes: Size of the file.
    """

    num_outputs: int
    num_identical: int
    largest_difference: int
    accuracy: float | None
    int8_accuracy: float | None
    operations: Operations
    num_bytes: int

    @property
    def identical(self) -> float:
        """The share of outputs that are the same integer."""
        return self.num_identical / self.num_outputs

    def __str__(self) -> str:
        rows = [
            ("identical outputs", f"{self.num_identical} of {self.num_outputs}"),
            ("", f"{self.identical:.2%}"),
            ("largest difference", f"{self.largest_difference} LSB"),
        ]
        if self.accuracy is not None:
            rows.append(("accuracy of the model", f"{self.accuracy:.2%}"))
        if self.int8_accuracy is not None:
            rows.append(("accuracy of the file", f"{self.int8_accuracy:.2%}"))
        rows.append(("file", readable_bytes(self.num_bytes)))
        done = self.operations
        floats = f"{done.num_floats} of {done.num_operations}"
        rows.append(("operations with floats", floats))
        for layer, kinds in done.floats.items():
            counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            rows.append((f"  {layer or '(elsewhere)'}", counted))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def compare(model: keras.Model, path: str | os.PathLike[str], data: Any) -> Comparison:
    """Runs a file of `tfgpipe.export_int8`, and its model, on the same inputs.

    The model is run in float32, unpipelined, in inference. Its outputs are rounded to
    the integers of the file's.

    Args:
        model: The model that was exported.
        path: The file.
        data: Inputs, arrays in the structure that the model takes; or `(inputs,
            labels)`; or a dataset of batches of either. Labels are numbers of classes,
            or one-hot.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If there are no data.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"There is no file to compare with: '{path}'. `tfgpipe.export_int8(model, "
            "path)` writes it."
        )
    copy = plain_copy(model)
    structure = inputs_of(copy)
    names = [x.name for x in keras.tree.flatten(structure)]
    file = Interpreter(path, input_names=names)
    tally = _Tally()
    for inputs, labels in _batches(data):
        outputs = copy(keras.tree.pack_sequence_as(structure, inputs))
        wanted = [np.asarray(x) for x in keras.tree.flatten(outputs)]
        given = file.run(inputs)
        for tensor, want, got in zip(file.outputs, wanted, given, strict=True):
            tally.add(tensor.quantized(want), got)
        if labels is not None and len(wanted) == 1:
            tally.add_labels(labels, wanted[0], file.outputs[0].numbers(given[0]))
    if not tally.num_outputs:
        raise ValueError("A comparison takes data. Received none: no row at all.")
    names_of_layers = {layer.name for layer in keras_internals.inner_layers(copy)}
    return Comparison(
        num_outputs=tally.num_outputs,
        num_identical=tally.num_identical,
        largest_difference=tally.largest,
        accuracy=tally.accuracy(0),
        int8_accuracy=tally.accuracy(1),
        operations=operations(path, names_of_layers),
        num_bytes=path.stat().st_size,
    )


class _Tally:
    """What was counted so far."""

    def __init__(self) -> None:
        self.num_outputs = 0
        self.num_identical = 0
        self.largest = 0
        self._num_labels = 0
        self._right = [0, 0]

    def add(self, wanted: np.ndarray, given: np.ndarray) -> None:
        """Counts equal outputs."""
        apart = np.abs(wanted.astype(np.int64) - given.astype(np.int64))
        self.num_outputs += apart.size
        self.num_identical += int((apart == 0).sum())
        self.largest = max(self.largest, int(apart.max(initial=0)))

    def add_labels(self, labels: np.ndarray, *outputs: np.ndarray) -> None:
        """Counts right classes of each of two outputs."""
        right = [right_classes(labels, each) for each in outputs]
        if all(each is not None for each in right):
            self._num_labels += right[0].size
            self._right = [
                before + int(now.sum())
                for before, now in zip(self._right, right, strict=True)
            ]

    def accuracy(self, which: int) -> float | None:
        """Returns the share of right classes, or None if there were no labels."""
        return self._right[which] / self._num_labels if self._num_labels else None


def right_classes(labels: np.ndarray, outputs: np.ndarray) -> Any:
    """Returns which outputs are largest at the label, None if they are no classes.

    >>> right_classes(np.array([1, 0]), np.array([[0.1, 0.9], [0.3, 0.7]]))
    array([ True, False])

    Args:
        labels: Numbers of classes, `[...]` or `[..., 1]`, or one-hot, `[..., C]`.
        outputs: `[..., C]`.
    """
    if outputs.shape[-1] < 2:
        return None
    if labels.shape == outputs.shape:
        labels = labels.argmax(axis=-1)
    if labels.shape == (*outputs.shape[:-1], 1):
        labels = labels[..., 0]
    if labels.shape != outputs.shape[:-1]:
        return None
    return outputs.argmax(axis=-1) == labels


def _batches(data: Any) -> Iterator[tuple[Sequence[np.ndarray], np.ndarray | None]]:
    """Yields inputs, in flat order, and labels or None."""
    parts = data.as_numpy_iterator() if isinstance(data, tf.data.Dataset) else [data]
    for part in parts:
        # Not as Keras unpacks them, to which a list of two inputs is one with labels.
        if isinstance(part, tuple) and len(part) > 1:
            for *inputs, labels in batches(part[:2], size=_ROWS):
                yield inputs, labels
        else:
            inputs = part[0] if isinstance(part, tuple) else part
            for arrays in batches(inputs, size=_ROWS):
                yield arrays, None
