"""TFLite files: an interpreter, the operations of a file, its comparison with a model.

Operations of a file are named like the TensorFlow operations they come from,
`model/quant_dense_1/dense_1/MatMul`, each part a layer or a name scope within one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals, tflite
from tfgpipe._util import readable_bytes
from tfgpipe.quantization.model_copies import plain_copy

# They convert between integers and floats, and compute nothing.
_CONVERSIONS = frozenset({"QUANTIZE", "DEQUANTIZE"})


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input or an output of a file.

    Attributes:
        name: Its name in the file's signature.
        dtype: The type of its values.
        scale: The value of one step of the integer, 0 if it is not quantized.
        zero_point: The integer of zero.
    """

    name: str
    dtype: np.dtype
    scale: float
    zero_point: int

    def quantize(self, x: np.ndarray) -> np.ndarray:
        """Returns values in the tensor's type, floats as integers."""
        if not self.scale:
            return x.astype(self.dtype)
        steps = np.round(np.asarray(x, np.float64) / self.scale) + self.zero_point
        ends = np.iinfo(self.dtype)
        return np.clip(steps, ends.min, ends.max).astype(self.dtype)

    def dequantize(self, x: np.ndarray) -> np.ndarray:
        """Returns the real values of the tensor's integers."""
        if not self.scale:
            return x
        return (x.astype(np.float32) - self.zero_point) * np.float32(self.scale)


class LiteInterpreter:
    """Runs a TFLite file.

    Args:
        path: The file.
        input_names: Names of the model's inputs, in order. One input needs no name.

    Attributes:
        inputs: Its inputs, in the order of the model's.
        outputs: Its outputs, in the order of the model's.
    """

    def __init__(self, path: str | Path, *, input_names: Sequence[str]) -> None:
        self._runner = _interpreter(path, delegates=True).get_signature_runner()
        inputs = self._runner.get_input_details()
        outputs = self._runner.get_output_details()
        names = inputs if len(inputs) == 1 else input_names
        self.inputs = [_tensor(name, inputs[name]) for name in names]
        names = sorted(outputs, key=lambda name: int(re.sub(r"\D", "", name) or 0))
        self.outputs = [_tensor(name, outputs[name]) for name in names]

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns outputs in the file's types, of inputs as real values."""
        arguments = {
            tensor.name: tensor.quantize(np.asarray(x))
            for tensor, x in zip(self.inputs, inputs, strict=True)
        }
        outputs = self._runner(**arguments)
        return [outputs[tensor.name] for tensor in self.outputs]


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of a file.

    Attributes:
        num_operations: The number of operations.
        floats: The number of those that compute with floats, by the layer that they
            come from, `""` for those whose name tells none, and by kind.
    """

    num_operations: int
    floats: Mapping[str, Mapping[str, int]]

    @property
    def num_floats(self) -> int:
        """The number of operations that compute with floats."""
        return sum(sum(kinds.values()) for kinds in self.floats.values())


def operations(path: str | Path, layers: Collection[str]) -> Operations:
    """Returns the operations of a file."""
    all_operations = tflite.lite_operations(_interpreter(path, delegates=False))
    floats: dict[str, collections.Counter[str]] = {}
    for operation in all_operations:
        if operation.kind not in _CONVERSIONS and np.float32 in operation.dtypes:
            layer = layer_of(operation.name, layers)
            floats.setdefault(layer, collections.Counter())[operation.kind] += 1
    return Operations(len(all_operations), floats)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outputs of a file in 8 bits beside those of its model.

    Attributes:
        num_outputs: The number of values that were compared.
        num_identical: The number of those that are the same integer.
        largest_difference: The largest difference in steps of the integer (LSB).
        accuracy: Share of labels that the model gives, or None without labels.
        int8_accuracy: Share of labels that the file gives, or None.
        operations: The operations of the file.
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
            labels)`; or a dataset of batches of either. Labels are indices of
            classes, or one-hot.

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
    structure = copy.inputs[0] if isinstance(copy, keras.Sequential) else copy.input
    file = LiteInterpreter(path, input_names=[x.name for x in copy.inputs])
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
            right = _right_classes(labels, expected[0])
            if right is not None:
                dequantized = file.outputs[0].dequantize(received[0])
                counts["labels"] += right.size
                counts["right"] += int(right.sum())
                counts["int8 right"] += int(_right_classes(labels, dequantized).sum())
    if not counts["outputs"]:
        raise ValueError("A comparison takes data. Received no examples.")
    has_labels = counts["labels"] > 0
    return Comparison(
        num_outputs=counts["outputs"],
        num_identical=counts["identical"],
        largest_difference=largest,
        accuracy=counts["right"] / counts["labels"] if has_labels else None,
        int8_accuracy=counts["int8 right"] / counts["labels"] if has_labels else None,
        operations=operations(
            path, {x.name for x in keras_internals.layers.inner_layers(copy)}
        ),
        num_bytes=path.stat().st_size,
    )


def _right_classes(labels: np.ndarray, outputs: np.ndarray) -> Any:
    """Returns True for examples with the largest output at the label.

    None if outputs are no classes, or labels are none of them.

    >>> _right_classes(np.array([1, 0]), np.array([[0.1, 0.9], [0.3, 0.7]]))
    array([ True, False])

    Args:
        labels: Indices of classes, `[...]` or `[..., 1]`, or one-hot, `[..., C]`.
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
    is_dataset = isinstance(data, tf.data.Dataset)
    for batch in data.as_numpy_iterator() if is_dataset else [data]:
        # Not as Keras unpacks them, to which a list of two inputs is one with labels.
        has_labels = isinstance(batch, tuple) and len(batch) > 1
        for arrays in batches(batch[:2] if has_labels else batch, size=256):
            yield (arrays[:-1], arrays[-1]) if has_labels else (arrays, None)


def layer_of(name: str, layers: Collection[str]) -> str:
    """Returns the innermost layer in the name of an operation, or an empty string.

    The name of a layer that is called again ends in the index of the call.

    >>> layer_of("model_1/quant_dense_1/dense_1/MatMul", {"dense", "quant_dense"})
    'dense'

    Args:
        name: A path that ends in the operation's own name. Of the names of fused
            operations, separated by semicolons, the first counts.
        layers: Names of layers.
    """
    for part in reversed(name.partition(";")[0].split("/")[:-1]):
        for candidate in (part, re.sub(r"_\d+$", "", part)):
            if candidate in layers:
                return candidate
    return ""


def batches(x: Any, *, size: int) -> Iterator[list[np.ndarray]]:
    """Yields the arrays of a structure, or of a dataset of such, in small batches.

    Args:
        x: Arrays in any structure, or a dataset of batches of them.
        size: The largest number of examples in a batch.
    """
    if isinstance(x, tf.data.Dataset):
        for batch in x.as_numpy_iterator():
            yield from batches(batch, size=size)
        return
    arrays = [np.asarray(each) for each in keras.tree.flatten(x)]
    for start in range(0, len(arrays[0]), size):
        yield [each[start : start + size] for each in arrays]


def _tensor(name: str, details: Mapping[str, Any]) -> Tensor:
    return Tensor(name, np.dtype(details["dtype"]), *details["quantization"])


def _interpreter(path: str | Path, *, delegates: bool) -> Any:
    resolvers = tf.lite.experimental.OpResolverType
    with without_deprecation():
        return tf.lite.Interpreter(
            str(path),
            experimental_op_resolver_type=resolvers.AUTO
            if delegates
            else resolvers.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )


@contextlib.contextmanager
def without_deprecation() -> Iterator[None]:
    """Silences what TensorFlow 2.21 says of its interpreter: that it is to go.

    Its successor is a package of its own. No longer needed once that is required.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\s*Warning: tf.lite.Interpreter")
        yield
