"""The projections of attention: into heads that are on T devices, and out of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfgpipe.tensor_parallel import device_ops, linear
from tfgpipe.tensor_parallel.linear import Collective
from tfgpipe.tensor_parallel.sharded_layer import ShardedLayer


class _Projection(ShardedLayer):
    """A projection whose kernel is `kernel_parts`, and its bias `bias_parts` or `bias`.

    Args:
        collective: As of `TPDense`.
        use_bias: Whether there is a bias.
        kernel_initializer: Draws the full kernel.
        bias_initializer: Draws the full bias.
        **kwargs: Of the base layer.
    """

    config_names: ClassVar[tuple[str, ...]] = (
        *("collective", "use_bias", "kernel_initializer", "bias_initializer"),
    )

    def __init__(
        self,
        *,
        collective: Collective,
        use_bias: bool,
        kernel_initializer: Any,
        bias_initializer: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.collective, self.use_bias = collective, use_bias
        self.kernel_initializer = kernel_initializer
        self.bias_initializer = bias_initializer


class InputToHeads(_Projection):
    """Projects sequences for the heads of each device.

    Its files of weights are those of a `keras.layers.EinsumDense("abc,cde->abde")`.

    Args:
        num_heads: The number of heads. T divides it.
        size: Size of each head's projection.
        **kwargs: Of the base classes.

    Input shape:
        `(batch, length, features)`.

    Output shape:
        A tuple of T parts `(batch, length, num_heads / T, size)`, each on its device.
    """

    config_is_complete = True
    config_names = ("num_heads", "size", *_Projection.config_names)

    def __init__(self, num_heads: int, *, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_heads, self.size = num_heads, size

    def build(self, input_shape: Any) -> None:
        """Creates the weights."""
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
        devices = self.shard_devices
        kernels = self.values(self.kernel_parts)
        matrices = device_ops.on_each(devices, _matrix, kernels)
        products = linear.column(inputs, matrices, devices, self.collective)
        biases = [self.values(self.bias_parts)] if self.use_bias else []
        return tuple(device_ops.on_each(devices, self._by_head, products, *biases))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of each part."""
        heads = self.num_heads // self.num_shards
        return ((*input_shape[:-1], heads, self.size),) * self.num_shards

    def _by_head(self, y: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        heads = self.num_heads // self.num_shards
        # Constants if sizes are known: of others XLA makes no reshape if the other
        # shard's device computes them.
        y = keras.ops.reshape(y, (*keras.ops.shape(y)[:-1], heads, self.size))
        return keras.ops.add(y, *bias) if bias else y


class HeadsToOutput(_Projection):
    """Projects the outputs of the heads on each device, and sums over heads.

    Its files of weights are those of a `keras.layers.EinsumDense("abcd,cde->abe")`.

    Args:
        units: Size of the output.
        **kwargs: Of the base classes.

    Input shape:
        A tuple of T parts `(batch, length, num_heads / T, size)`.

    Output shape:
        `(batch, length, units)`, on the first device.
    """

    config_is_complete = True
    config_names = ("units", *_Projection.config_names)

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape: Any) -> None:
        """Creates the weights."""
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
        devices = self.shard_devices
        kernels = self.values(self.kernel_parts)
        matrices = device_ops.on_each(devices, _matrix_of_heads, kernels)
        rows = device_ops.on_each(devices, _side_by_side, inputs)
        outputs = linear.row(rows, matrices, devices, self.collective)
        outputs = linear.full(outputs, devices)
        if not self.use_bias:
            return outputs
        bias = self.value(self.bias, devices[0])
        return device_ops.on(devices[0], keras.ops.add, outputs, bias)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output."""
        return (*input_shape[0][:-2], self.units)


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
    return keras.ops.reshape(x, (*keras.ops.shape(x)[:-2], heads * size))
