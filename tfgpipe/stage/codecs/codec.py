"""Codecs: how a value is encoded for the way from one stage to another.

A value is encoded where it is made, sent, and decoded where it is read, so that less is
sent between devices. A stage computes on, and saves for its backward, what it received.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from tfgpipe._util import Choice

Spec: TypeAlias = "tf.TensorSpec | keras.KerasTensor"


@dataclasses.dataclass(frozen=True)
class Codec(Choice, abc.ABC):
    """Encodes floating point values at the boundary between two stages.

    A codec of one's own is a frozen dataclass, given as `transfer_dtype`:

    >>> import dataclasses, math
    >>> @dataclasses.dataclass(frozen=True)
    ... class HalfForward(tfgpipe.Codec):
    ...     name = "half_forward"
    ...     def encode(self, tensor):
    ...         return [tf.cast(tensor, "float16")]
    ...     def decode(self, encoded, spec):
    ...         return tf.cast(encoded[0], spec.dtype)
    ...     def num_bytes(self, spec):
    ...         return 2 * math.prod(size or 1 for size in spec.shape)
    >>> layers = [keras.layers.Dense(4) for _ in range(2)]
    >>> layer = tfgpipe.PipelinedLayer(
    ...     layers, num_stages=2, num_microbatches=2, transfer_dtype=HalfForward()
    ... )

    To be saved with a model, it is registered with
    `keras.saving.register_keras_serializable`.

    Attributes:
        name: Name in tables and saved models. Of the class.
    """

    @abc.abstractmethod
    def encode(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Encodes a value `[b, ...]`: returns the tensors to send."""

    @abc.abstractmethod
    def decode(self, encoded: Sequence[tf.Tensor], spec: tf.TensorSpec) -> tf.Tensor:
        """Decodes a value of a shape and dtype."""

    @abc.abstractmethod
    def num_bytes(self, spec: Spec) -> int:
        """Returns the bytes that are sent of a value; sizes not known count as one."""

    def compresses(self, spec: Spec) -> bool:
        """Returns whether a floating point value is encoded, or sent as it is."""
        del spec
        return True

    def encode_gradient(self, gradient: tf.Tensor) -> tf.Tensor:
        """Encodes the gradient of a decoded value, to be sent back.

        By default it is sent as it is. With an encoding that has no gradient of use,
        such as rounding, this is the straight-through gradient.
        """
        return gradient

    def decode_gradient(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Decodes a gradient to a dtype."""
        return tf.cast(encoded, dtype)
