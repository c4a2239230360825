"""Casts to half precision: values, and gradients on their way back, are rounded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfgpipe.stage.codecs.codec import Codec, Spec


@dataclasses.dataclass(frozen=True)
class CastCodec(Codec):
    """Casts what is larger; the gradient is that of a pair of casts."""

    @property
    def _dtype(self) -> tf.DType:
        return tf.as_dtype(self.name)

    def encode(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Casts a value."""
        return [self._half(tensor)]

    def decode(self, encoded: Sequence[tf.Tensor], spec: tf.TensorSpec) -> tf.Tensor:
        """Casts a value back."""
        return tf.cast(encoded[0], spec.dtype)

    def num_bytes(self, spec: Spec) -> int:
        """Returns the bytes of the value in half precision."""
        return math.prod(n or 1 for n in spec.shape) * self._dtype.size

    def compresses(self, spec: Spec) -> bool:
        """Returns whether a value is larger than in half precision."""
        return tf.as_dtype(spec.dtype).size > self._dtype.size

    def encode_gradient(self, gradient: tf.Tensor) -> tf.Tensor:
        """Casts a gradient."""
        return self._half(gradient)

    def _half(self, tensor: tf.Tensor) -> tf.Tensor:
        if tensor.dtype == tf.float64:
            # TensorFlow rounds twice. So does XLA now, which by itself rounds once.
            tensor = tf.cast(tensor, tf.float32)
        return tf.cast(tensor, self._dtype)


@dataclasses.dataclass(frozen=True)
class BFloat16Codec(CastCodec):
    """Rounds to bfloat16."""

    name = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Float16Codec(CastCodec):
    """Rounds to float16."""

    name = "float16"
