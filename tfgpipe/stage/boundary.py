"""Boundary compression: how values are encoded between stages.

A value is encoded where it is made, sent, and decoded where it is read, so that less is
sent between devices. A stage computes on, and saves for its backward, what it received.

    "bfloat16", "float16"   rounded to that type; so is the gradient on its way back,
                            which is the gradient of a pair of casts
    "int8"                  each example (row of the batch) in 255 steps up to its
                            largest number, that over 127 sent along
    "int8_channel"          each channel, along the last axis, of a microbatch likewise

The steps of the last two have no gradient of use. Theirs is straight-through: that of
no compression at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import keras
import tensorflow as tf

from tfgpipe._util import num_bytes

TransferDtype = Literal["bfloat16", "float16", "int8", "int8_channel"]

Spec: TypeAlias = "tf.TensorSpec | keras.KerasTensor"

_MAX_INT8 = 127


@dataclasses.dataclass(frozen=True)
class BoundaryCodec:
    """How values cross from stage to stage.

    Attributes:
        dtype: What they are compressed to, or None for as they are.
        uncompressed: Ids of the values that are not compressed: the outputs of a model.
    """

    dtype: TransferDtype | None = None
    uncompressed: tuple[int, ...] = ()

    def compresses(self, value_id: int, spec: Spec) -> bool:
        """Returns whether a value is compressed.

        Floating point numbers are, if that makes them smaller, and if there are some in
        each example.
        """
        dtype = tf.as_dtype(spec.dtype)
        if self.dtype is None or value_id in self.uncompressed or not dtype.is_floating:
            return False
        if self._is_cast:
            return dtype.size > self._cast.size
        return len(spec.shape) > 1

    def encode(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Encodes a value `[b, ...]`: returns the tensors to send."""
        if self._is_cast:
            return [tf.cast(tensor, self._cast)]
        tensor = tf.cast(tensor, _scale_dtype(tensor.dtype))
        rank = len(tensor.shape)
        axes = range(1, rank) if self.dtype == "int8" else range(rank - 1)
        largest = tf.reduce_max(tf.abs(tensor), axis=list(axes), keepdims=True)
        largest = tf.maximum(largest, 0.0)  # Of no rows it is less.
        # Not divided by 127, which TensorFlow would do in this way in some graphs only.
        scale = largest * (1 / _MAX_INT8)
        steps = tf.round(tf.math.divide_no_nan(tensor, scale))
        # Scales too small to be exact would make for more steps.
        steps = tf.clip_by_value(steps, -_MAX_INT8, _MAX_INT8)
        return [tf.cast(steps, tf.int8), scale]

    def decode(self, encoded: Sequence[tf.Tensor], spec: tf.TensorSpec) -> tf.Tensor:
        """Decodes a value of a shape and dtype."""
        if self._is_cast:
            return tf.cast(encoded[0], spec.dtype)
        steps, scale = encoded
        tensor = tf.cast(tf.cast(steps, scale.dtype) * scale, spec.dtype)
        return tf.ensure_shape(tensor, spec.shape)

    def encode_gradient(self, gradient: tf.Tensor) -> tf.Tensor:
        """Encodes the gradient of a decoded value, to be sent back."""
        return tf.cast(gradient, self._cast) if self._is_cast else gradient

    def decode_gradient(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Decodes a gradient to a dtype."""
        return tf.cast(encoded, dtype)

    def encoded_bytes(self, specs: Mapping[int, Spec]) -> dict[int, int]:
        """Returns the bytes that are sent of each value; sizes not known are one."""
        return {n: self._num_bytes(n, spec) for n, spec in specs.items()}

    def _num_bytes(self, value_id: int, spec: Spec) -> int:
        if not self.compresses(value_id, spec):
            return num_bytes(spec)
        sizes = [n or 1 for n in spec.shape]
        if self._is_cast:
            return math.prod(sizes) * self._cast.size
        scales = sizes[0] if self.dtype == "int8" else sizes[-1]
        return math.prod(sizes) + scales * _scale_dtype(tf.as_dtype(spec.dtype)).size

    @property
    def _is_cast(self) -> bool:
        return self.dtype in ("bfloat16", "float16")

    @property
    def _cast(self) -> tf.DType:
        return tf.as_dtype(self.dtype)


def _scale_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the type that values of a type are scaled in, and their scales sent."""
    return dtype if dtype.size > tf.float32.size else tf.float32
