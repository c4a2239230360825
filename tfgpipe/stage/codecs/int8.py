"""Symmetric int8 with one scale, of the largest magnitude, for each slice of a value.

Rounding has no gradient of use. The gradient here is straight-through: that of no
compression at all.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfgpipe.stage.codecs.codec import Codec, Spec

_MAX_INT8 = 127


@dataclasses.dataclass(frozen=True)
class ScaledInt8Codec(Codec):
    """Rounds each slice to 255 levels, and sends its scale along."""

    @abc.abstractmethod
    def _axes(self, rank: int) -> range:
        """Returns the axes of a value that have a scale in common."""

    @abc.abstractmethod
    def _num_scales(self, sizes: Sequence[int]) -> int:
        """Returns the number of scales of a value of these sizes."""

    def encode(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the levels `[b, ...]`, and the scales."""
        tensor = tf.cast(tensor, _scale_dtype(tensor.dtype))
        axes = self._axes(len(tensor.shape))
        largest = tf.reduce_max(tf.abs(tensor), axis=list(axes), keepdims=True)
        largest = tf.maximum(largest, 0.0)  # Without examples it is less.
        # Not divided by 127, which TensorFlow would do in this way in some graphs only.
        scale = largest * (1 / _MAX_INT8)
        levels = tf.round(tf.math.divide_no_nan(tensor, scale))
        # Scales too small to be exact would make for more levels.
        levels = tf.clip_by_value(levels, -_MAX_INT8, _MAX_INT8)
        return [tf.cast(levels, tf.int8), scale]

    def decode(self, encoded: Sequence[tf.Tensor], spec: tf.TensorSpec) -> tf.Tensor:
        """Multiplies levels by their scales."""
        levels, scale = encoded
        tensor = tf.cast(tf.cast(levels, scale.dtype) * scale, spec.dtype)
        return tf.ensure_shape(tensor, spec.shape)

    def num_bytes(self, spec: Spec) -> int:
        """Returns the bytes of levels and scales."""
        sizes = [n or 1 for n in spec.shape]
        scale = _scale_dtype(tf.as_dtype(spec.dtype))
        return math.prod(sizes) + self._num_scales(sizes) * scale.size

    def compresses(self, spec: Spec) -> bool:
        """Returns whether there are several numbers to a scale."""
        return len(spec.shape) > 1


@dataclasses.dataclass(frozen=True)
class Int8Codec(ScaledInt8Codec):
    """Rounds to int8 with a scale for each example."""

    name = "int8"

    def _axes(self, rank: int) -> range:
        return range(1, rank)

    def _num_scales(self, sizes: Sequence[int]) -> int:
        return sizes[0]


@dataclasses.dataclass(frozen=True)
class ChannelInt8Codec(ScaledInt8Codec):
    """Rounds to int8 with a scale for each channel, the last axis, of a microbatch."""

    name = "int8_channel"

    def _axes(self, rank: int) -> range:
        return range(rank - 1)

    def _num_scales(self, sizes: Sequence[int]) -> int:
        return sizes[-1]


def _scale_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the type that values of a type are scaled in, and their scales sent."""
    return dtype if dtype.size > tf.float32.size else tf.float32
