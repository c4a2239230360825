"""Random values for probes, where there are no real ones yet."""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals


def example_variable_value(variable: keras.Variable) -> tf.Tensor:
    """Returns the value of a variable, or a plausible one if it has none yet."""
    if keras_internals.variables.is_initialized(variable):
        return tf.convert_to_tensor(variable.value)
    return example_value(variable)


def example_value(
    variable: keras.Variable, *, shape: tuple[int, ...] | None = None
) -> tf.Tensor:
    """Returns a plausible value of a variable, whatever value it has.

    Args:
        variable: The variable.
        shape: Another shape than its own, of some of its columns.
    """
    shape = tuple(variable.shape) if shape is None else shape
    if not variable.trainable or len(shape) < 2:
        return tf.ones(shape, variable.dtype)
    # Keeps activations in range, through whatever number of layers.
    scale = math.prod(shape[:-1]) ** -0.5
    noise = tf.random.stateless_normal(shape, seed=[0, 0]) * scale
    return tf.cast(noise, variable.dtype)


def example_tensor(spec: tf.TensorSpec, *, unknown_size: int) -> tf.Tensor:
    """Returns noise, zeros, True or empty strings of a shape and type.

    Args:
        spec: The shape and type.
        unknown_size: Stands in for each size that is not known.
    """
    shape = [unknown_size if n is None else n for n in spec.shape]
    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(shape, seed=[0, 0]), spec.dtype)
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.cast(tf.fill(shape, spec.dtype.is_bool), spec.dtype)
