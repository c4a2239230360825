"""Comparison of a file in 8 bits with its model."""

from __future__ import annotations

import collections
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
from tfgpipe.quantization.copies import inputs_of, plain_copy
from tfgpipe.quantization.tflite import Interpreter, Operations, batches, operations

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
    counts: collections.Counter[str] = collections.Counter()
    largest = 0
    for inputs, labels in _batches(data):
        outputs = copy(keras.tree.pack_sequence_as(structure, inputs))
        expected = [np.asarray(x) for x in keras.tree.flatten(outputs)]
        received = file.run(inputs)
        for tensor, a, b in zip(file.outputs, expected, received, strict=True):
            difference = np.abs(tensor.quantize(a).astype(np.int64) - b)
            counts["outputs"] += difference.size
            counts["identical"] += int((difference == 0).sum())
            largest = max(largest, int(difference.max(initial=0)))
        if labels is not None and len(expected) == 1:
            right = right_classes(labels, expected[0])
            if right is not None:
                dequantized = file.outputs[0].dequantize(received[0])
                counts["labels"] += right.size
                counts["right"] += int(right.sum())
                counts["int8 right"] += int(right_classes(labels, dequantized).sum())
    if not counts["outputs"]:
        raise ValueError("A comparison takes data. Received none: no row at all.")
    has_labels = counts["labels"] > 0
    return Comparison(
        num_outputs=counts["outputs"],
        num_identical=counts["identical"],
        largest_difference=largest,
        accuracy=counts["right"] / counts["labels"] if has_labels else None,
        int8_accuracy=counts["int8 right"] / counts["labels"] if has_labels else None,
        operations=operations(
            path, {x.name for x in keras_internals.inner_layers(copy)}
        ),
        num_bytes=path.stat().st_size,
    )


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
        has_labels = isinstance(part, tuple) and len(part) > 1
        given = part[:2] if has_labels else part
        for arrays in batches(given, size=_ROWS):
            yield (arrays[:-1], arrays[-1]) if has_labels else (arrays, None)
