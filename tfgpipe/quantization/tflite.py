"""TFLite files: an interpreter, and a list of operations.

Operations of a file are named like the TensorFlow operations they come from,
`model/quant_dense_1/dense_1/MatMul`, each part a layer or a name scope within one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import tflite

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


class Interpreter:
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
        names = list(inputs) if len(inputs) == 1 else list(input_names)
        self.inputs = [_tensor(name, inputs[name]) for name in names]
        order = sorted(outputs, key=lambda name: int(re.sub(r"\D", "", name) or 0))
        self.outputs = [_tensor(name, outputs[name]) for name in order]

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
    """Returns the operations of a file.

    Args:
        path: The file.
        layers: Names of the model's layers.
    """
    found = tflite.lite_operations(_interpreter(path, delegates=False))
    floats: dict[str, collections.Counter[str]] = {}
    for operation in found:
        if operation.kind not in _CONVERSIONS and np.float32 in operation.dtypes:
            layer = layer_of(operation.name, layers)
            floats.setdefault(layer, collections.Counter())[operation.kind] += 1
    return Operations(len(found), floats)


def layer_of(name: str, layers: Collection[str]) -> str:
    """Returns the innermost layer in the name of an operation, or an empty string.

    The name of a layer that is called again ends in the index of the call.

    >>> layer_of("model_1/quant_dense_1/dense_1/MatMul", {"dense", "quant_dense"})
    'dense'

    Args:
        name: Parts of a path, the last the operation's own. Of operations that became
            one, after another, the first counts.
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
        size: The most rows of a batch.
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
