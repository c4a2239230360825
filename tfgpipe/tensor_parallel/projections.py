"""The projections of attention: into heads that are on T devices, and out of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.tensor_parallel import device_ops, linear
from tfgpipe.tensor_parallel.linear import Collective
from tfgpipe.tensor_parallel.sharded_layer import ShardedLayer


class InputToHeads(ShardedLayer):
    """Projects sequences for the heads of each device.

    Its files of weights are those of a `keras.layers.EinsumDense("abc,cde->abde")`.

    Args:
        num_heads: How many heads there are. T divides it.
        size: Of what each head gets.
        collective: As of `TPDense`.
        use_bias: Whether there is a bias.
        kernel_initializer: Draws the full kernel, `[features, num_heads, size]`.
        bias_initializer: Draws the full bias, `[num_heads, size]`.
        **kwargs: Of the base layer.

    Input shape:
        `(batch, length, features)`.

    Output shape:
        A tuple of T parts `(batch, length, num_heads / T, size)`, each on its device.
    """

    config_is_complete = True

    def __init__(
        self,
        num_heads: int,
        *,
        size: int,
        collective: Collective,
        use_bias: bool,
        kernel_initializer: Any,
        bias_initializer: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads, self.size = num_heads, size
        self.collective, self.use_bias = collective, use_bias
        self.kernel_initializer = kernel_initializer
        self.bias_initializer = bias_initializer

    def build(self, input_shape: Any) -> None:
        """Makes the weights."""
        self.kernel_parts = self.add_sharded_weight(
            "kernel",
            (input_shape[-1], self.num_heads, self.size),
            axis=1,
            initializer=_by_inputs(self.kernel_initializer, num_axes=1),
        )
        if self.use_bias:
            self.bias_parts = self.add_sharded_weight(
                "bias",
                (self.num_heads, self.size),
                axis=0,
                initializer=self.bias_initializer,
            )

    def call(self, inputs: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Returns the projections, sharded."""
        devices, T = self.shard_devices, self.num_shards
        kernels = self.values(self.kernel_parts)
        matrices = [device_ops.on(devices[t], _matrix, kernels[t]) for t in range(T)]
        products = linear.column(inputs, matrices, devices, self.collective)
        biases = [self.values(self.bias_parts)] if self.use_bias else []
        return tuple(
            device_ops.on(device, self._by_head, *terms)
            for device, *terms in zip(devices, products, *biases, strict=True)
        )

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of each part."""
        heads = self.num_heads // self.num_shards
        return ((*input_shape[:-1], heads, self.size),) * self.num_shards

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "size": self.size,
            **_shared_config(self),
        }

    def _by_head(self, y: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        heads = self.num_heads // self.num_shards
        y = keras.ops.reshape(y, (*tf.unstack(tf.shape(y)[:-1]), heads, self.size))
        return keras.ops.add(y, *bias) if bias else y


class HeadsToOutput(ShardedLayer):
    """Projects the outputs of the heads on each device, and sums over heads.

    Its files of weights are those of a `keras.layers.EinsumDense("abcd,cde->abe")`.

    Args:
        units: Size of the output.
        collective: As of `TPDense`.
        use_bias: Whether there is a bias.
        kernel_initializer: Draws the full kernel, `[num_heads, size, units]`.
        bias_initializer: Draws the bias, `[units]`.
        **kwargs: Of the base layer.

    Input shape:
        A tuple of T parts `(batch, length, num_heads / T, size)`.

    Output shape:
        `(batch, length, units)`, on the first device.
    """

    config_is_complete = True

    def __init__(
        self,
        units: int,
        *,
        collective: Collective,
        use_bias: bool,
        kernel_initializer: Any,
        bias_initializer: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.units, self.collective, self.use_bias = units, collective, use_bias
        self.kernel_initializer = kernel_initializer
        self.bias_initializer = bias_initializer

    def build(self, input_shape: Any) -> None:
        """Makes the weights."""
        *_, heads, size = input_shape[0]
        self.kernel_parts = self.add_sharded_weight(
            "kernel",
            (heads * self.num_shards, size, self.units),
            axis=0,
            initializer=_by_inputs(self.kernel_initializer, num_axes=2),
        )
        if self.use_bias:
            self.bias = self.add_full_weight(
                "bias", (self.units,), initializer=self.bias_initializer
            )

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the projection, on the first device."""
        devices, T = self.shard_devices, self.num_shards
        kernels = self.values(self.kernel_parts)
        matrices = [
            device_ops.on(devices[t], _matrix_of_heads, kernels[t]) for t in range(T)
        ]
        rows = [device_ops.on(devices[t], _side_by_side, inputs[t]) for t in range(T)]
        outputs = linear.full(
            linear.row(rows, matrices, devices, self.collective), devices
        )
        if not self.use_bias:
            return outputs
        bias = self.value(self.bias, devices[0])
        return device_ops.on(devices[0], keras.ops.add, outputs, bias)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output."""
        return (*input_shape[0][:-2], self.units)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "units": self.units, **_shared_config(self)}


def _shared_config(layer: InputToHeads | HeadsToOutput) -> dict[str, Any]:
    return {
        "collective": layer.collective,
        "use_bias": layer.use_bias,
        "kernel_initializer": keras.initializers.serialize(layer.kernel_initializer),
        "bias_initializer": keras.initializers.serialize(layer.bias_initializer),
    }


def _by_inputs(initializer: Any, *, num_axes: int) -> Any:
    """Returns an initializer that draws kernels as Keras' EinsumDense does.

    It scales them by the sizes of inputs, the first axes, and outputs.

    Args:
        initializer: Scales by the sizes of a matrix.
        num_axes: The number of axes of inputs.
    """
    if not isinstance(initializer, keras.initializers.VarianceScaling):
        return initializer

    def draw(shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
        inputs, outputs = math.prod(shape[:num_axes]), math.prod(shape[num_axes:])
        return tf.reshape(initializer((inputs, outputs), dtype=dtype), shape)

    return draw


def _matrix(kernel: tf.Tensor) -> tf.Tensor:
    """Returns `[d, heads, size]` as a matrix."""
    return keras.ops.reshape(kernel, (kernel.shape[0], -1))


def _matrix_of_heads(kernel: tf.Tensor) -> tf.Tensor:
    """Returns `[heads, size, d]` as a matrix."""
    return keras.ops.reshape(kernel, (-1, kernel.shape[-1]))


def _side_by_side(x: tf.Tensor) -> tf.Tensor:
    """Returns `[..., heads, size]` with the heads side by side."""
    heads, size = x.shape[-2:]
    return keras.ops.reshape(x, (*tf.unstack(tf.shape(x)[:-2]), heads * size))
