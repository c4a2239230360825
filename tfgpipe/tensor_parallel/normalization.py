"""Layer normalization of features that are on T devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.tensor_parallel import device_ops, linear
from tfgpipe.tensor_parallel.linear import MaybeSharded
from tfgpipe.tensor_parallel.sharded_layer import ShardedLayer, check_divides


@keras.saving.register_keras_serializable(
    package="tfgpipe", name="TPLayerNormalization"
)
class LayerNormalization(ShardedLayer):
    """Layer normalization with features in T parts, each on a device of its own.

    It computes what `keras.layers.LayerNormalization` does over the last axis, and its
    files of weights are those of that layer. Each device takes mean and squared
    deviations of its part; the first one combines them (Chan et al. 1979), in one
    exchange.

    Args:
        epsilon: Number that is added to the variance.
        center: True for an offset `beta`.
        scale: True for a factor `gamma`.
        gather_output: True for the full output on the first device. False for a tuple
            of T parts along the last axis, each where it was computed.
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are, or those of the
            pipeline around the layer.
        beta_initializer: Initializer of the full `beta`.
        gamma_initializer: Initializer of the full `gamma`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        `(batch, ..., features)`, or a tuple of T parts of it.

    Output shape:
        `(batch, ..., features)`, or a tuple of T parts of it.

    Example:

    >>> norm = tfgpipe.layers.TPLayerNormalization(num_shards=2, gather_output=False)
    >>> [part.numpy().round(2).tolist() for part in norm(np.array([[1.0, 3.0]], "f"))]
    [[[-1.0]], [[1.0]]]

    Raises:
        ValueError: If T does not divide the features, or there are too few devices.
    """

    config_is_complete = True
    config_names = (
        *("epsilon", "center", "scale", "gather_output"),
        *("beta_initializer", "gamma_initializer"),
    )

    def __init__(
        self,
        *,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        gather_output: bool = True,
        num_shards: int | None = None,
        devices: Sequence[str] | None = None,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        **kwargs: Any,
    ) -> None:
        super().__init__(num_shards=num_shards, devices=devices, **kwargs)
        self.epsilon, self.center, self.scale = epsilon, center, scale
        self.gather_output = gather_output
        self.beta_initializer = keras.initializers.get(beta_initializer)
        self.gamma_initializer = keras.initializers.get(gamma_initializer)
        self.supports_masking = True
        self.autocast = False  # It computes in single precision at least.

    def build(self, input_shape: Any) -> None:
        """Creates the weights."""
        features = linear.width(input_shape)
        check_divides("features", features, self.num_shards, self.name)
        if self.scale:
            self.gamma_parts = self.add_parts(
                "gamma", (features,), axis=0, initializer=self.gamma_initializer
            )
        if self.center:
            self.beta_parts = self.add_parts(
                "beta", (features,), axis=0, initializer=self.beta_initializer
            )

    def call(self, inputs: MaybeSharded) -> MaybeSharded:
        """Returns the inputs normalized, full or sharded."""
        devices = self.shard_devices
        primary, T = devices[0], self.num_shards
        parts = linear.parts(inputs, devices)
        copies = [device_ops.copy(parts[t], devices[t], 2) for t in range(T)]
        x, y = zip(*copies, strict=True)
        moments = device_ops.on_each(devices, _moments, x)
        mean, inverse = device_ops.on(primary, self._joint, *itertools.chain(*moments))
        joint = [device_ops.copy(each, primary, T) for each in (mean, inverse)]
        weights = [
            self.values(weight.parts, self.variable_dtype)
            for weight in self.layout.weights
        ]
        outputs = tuple(
            device_ops.on_each(devices, self._normalize, y, *joint, *weights)
        )
        return linear.full(outputs, devices) if self.gather_output else outputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output, or of each of its parts."""
        outer, features = linear.outer(input_shape), linear.width(input_shape)
        if self.gather_output:
            return (*outer, features)
        return ((*outer, features // self.num_shards),) * self.num_shards

    def _joint(self, *moments: tf.Tensor) -> list[tf.Tensor]:
        """Returns the mean and inverse deviation of all features."""
        means, squares = tf.stack(moments[::2]), tf.stack(moments[1::2])
        mean = tf.reduce_mean(means, axis=0)
        between = tf.math.squared_difference(means, mean)
        variance = tf.reduce_mean(squares + between, axis=0)
        return [mean, tf.math.rsqrt(variance + self.epsilon)]

    def _normalize(
        self, x: tf.Tensor, mean: tf.Tensor, inverse: tf.Tensor, *weights: tf.Tensor
    ) -> tf.Tensor:
        y = (tf.cast(x, mean.dtype) - mean) * inverse
        if self.scale:
            y *= tf.cast(weights[0], y.dtype)
        if self.center:
            y += tf.cast(weights[-1], y.dtype)
        return tf.cast(y, self.compute_dtype)


def _moments(x: tf.Tensor) -> list[tf.Tensor]:
    """Returns mean and variance of the features of a part, `[..., 1]`."""
    x = tf.cast(x, keras.backend.result_type(x.dtype, "float32"))
    return list(tf.nn.moments(x, axes=[-1], keepdims=True))
