"""Sizes of variables and tensors in bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def num_bytes(
    like: tf.Tensor | tf.TensorSpec | keras.KerasTensor | keras.Variable,
) -> int:
    """Returns the size of a tensor or variable; sizes not known count as one."""
    import tensorflow as tf

    dtype = tf.as_dtype(like.dtype)
    unranked = isinstance(like.shape, tf.TensorShape) and like.shape.rank is None
    if unranked or dtype in (tf.variant, tf.resource):
        return 0
    return math.prod(n or 1 for n in like.shape) * dtype.size
