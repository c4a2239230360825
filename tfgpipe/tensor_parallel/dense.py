"""Dense layers whose columns or rows are sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import keras
import tensorflow as tf

from tfgpipe._util import argument_checks
from tfgpipe.tensor_parallel import device_ops, linear
from tfgpipe.tensor_parallel.linear import DIRECTIONS, Collective, MaybeSharded
from tfgpipe.tensor_parallel.sharded_layer import ShardedLayer, check_divides

Partition = Literal["column", "row"]

# Activations that look at all units.
_NOT_ELEMENTWISE = ("softmax", "log_softmax", "sparsemax", "glu")
# Arguments of all layers with kernels here.
_SHARED_NAMES = ("collective", "use_bias", "kernel_initializer", "bias_initializer")


@keras.saving.register_keras_serializable(package="tfgpipe", name="TPDense")
class Dense(ShardedLayer):
    """A dense layer with its kernel in T parts, each on a device of its own.

    It computes what `keras.layers.Dense` does, and its files of weights are those of
    that layer. A layer of columns followed by one of rows exchanges nothing between the
    two, if the first one's output stays sharded (Megatron-LM, Shoeybi et al. 2019):

    >>> up = tfgpipe.layers.TPDense(8, num_shards=2, gather_output=False)
    >>> down = tfgpipe.layers.TPDense(4, partition="row", num_shards=2)
    >>> x = np.ones((3, 6), "float32")
    >>> [tuple(part.shape) for part in up(x)], tuple(down(up(x)).shape)
    ([(3, 4), (3, 4)], (3, 4))

    Args:
        units: Size of the output.
        partition: `"column"`: each device has some of the units. `"row"`: each has some
            of the inputs, and the outputs are summed.
        collective: `"gather"`: the first device sends, gathers and sums. `"ring"`:
            chunks move from device to device while chunks multiply, forward and
            backward. `"bidirectional_ring"`: half of each goes round each way.
        gather_output: True for the full output on the first device. False for a tuple
            of T parts along the last axis, each where it was computed.
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are, or those of the
            pipeline around the layer.
        activation: Activation function. One of your own is applied to gathered
            outputs, since it may look at all units.
        use_bias: True for a bias. That of a row layer is on the first device alone.
        kernel_initializer: Initializer of the full kernel.
        bias_initializer: Initializer of the full bias.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        `(batch, ..., features)`, or a tuple of T parts of it.

    Output shape:
        `(batch, ..., units)`, or a tuple of T parts of it.

    Raises:
        ValueError: If an argument is none of the choices, T does not divide what is
            split, or there are too few devices.
    """

    config_is_complete = True
    config_names: ClassVar[tuple[str, ...]] = (
        *("units", "partition", "collective", "gather_output", "activation"),
        *("use_bias", "kernel_initializer", "bias_initializer"),
    )

    def __init__(
        self,
        units: int,
        *,
        partition: Partition = "column",
        collective: Collective = "gather",
        gather_output: bool = True,
        num_shards: int | None = None,
        devices: Sequence[str] | None = None,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        **kwargs: Any,
    ) -> None:
        super().__init__(num_shards=num_shards, devices=devices, **kwargs)
        self.units = argument_checks.check_count("units", units, most=2**31)
        self.partition = argument_checks.check_choice(
            "partition", partition, ("column", "row")
        )
        self.collective = argument_checks.check_choice(
            "collective", collective, [*DIRECTIONS]
        )
        self.gather_output = gather_output
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.supports_masking = True
        if partition == "column" or not gather_output:
            check_divides("units", units, self.num_shards, self.name)
        self._is_elementwise = _is_elementwise(self.activation)
        if not (gather_output or self._is_elementwise):
            raise ValueError(
                "Outputs that stay in parts are activated part by part. Received "
                f"activation={keras.activations.serialize(self.activation)!r}, which "
                f"may look at all units, in layer '{self.name}' with "
                "gather_output=False. Gather the output, or apply it afterwards."
            )

    @property
    def max_shards(self) -> int:
        """Size that T divides: the units, or of `partition="row"` the features."""
        if self.partition == "column":
            return int(self.units)
        return sum(part.shape[0] for part in self.kernel_parts)

    def build(self, input_shape: Any) -> None:
        """Creates the weights."""
        inputs, units = self._kernel_axes(input_shape)
        self._num_input_axes = len(inputs)
        by_columns = self.partition == "column"
        if not by_columns:
            features = math.prod(inputs)
            check_divides("input features", features, self.num_shards, self.name)
        self.kernel_parts = self.add_parts(
            "kernel",
            (*inputs, *units),
            axis=len(inputs) if by_columns else 0,
            initializer=_by_fans(self.kernel_initializer, len(inputs)),
        )
        if self.use_bias:
            bias = self.add_parts(
                "bias",
                units,
                axis=0 if by_columns else None,
                initializer=self.bias_initializer,
            )
            if by_columns:
                self.bias_parts = bias
            else:
                (self.bias,) = bias

    def call(self, inputs: MaybeSharded) -> MaybeSharded:
        """Returns the output of the dense layer, full or sharded."""
        devices = self.shard_devices
        product = linear.column if self.partition == "column" else linear.row
        outputs = product(inputs, self.shard_kernels(), devices, self.collective)
        terms = list(outputs) if linear.is_sharded(outputs) else [outputs]
        biases = self._biases(len(terms))
        results = device_ops.on_each(
            devices[: len(terms)], self.finish_shard, terms, *biases
        )
        outputs = results if linear.is_sharded(outputs) else results[0]
        if not self.gather_output:
            return tuple(linear.scatter(outputs, devices))
        outputs = linear.full(outputs, devices)
        if self._is_elementwise:
            return outputs
        return device_ops.on(devices[0], self.activation, outputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output, or of each of its parts."""
        outer = linear.outer(input_shape)
        if self.gather_output:
            return (*outer, self.units)
        return ((*outer, self.units // self.num_shards),) * self.num_shards

    def _kernel_axes(self, input_shape: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the kernel's axes of inputs, which it sums over, and of units."""
        return (linear.width(input_shape),), (self.units,)

    def shard_kernels(self) -> list[tf.Tensor]:
        """Returns each shard's part of the kernel, as a matrix."""
        kernels = self.values(self.kernel_parts)
        if kernels[0].shape.rank == 2:
            return kernels

        def matrix(kernel: tf.Tensor) -> tf.Tensor:
            inputs = math.prod(kernel.shape[: self._num_input_axes])
            return keras.ops.reshape(kernel, (inputs, -1))

        return device_ops.on_each(self.shard_devices, matrix, kernels)

    def _biases(self, num: int) -> list[list[tf.Tensor]]:
        """Returns the bias in a list of `num` parts, or nothing."""
        if not self.use_bias:
            return []
        if self.partition == "column":
            return [self.values(self.bias_parts)]
        (bias,) = self.values((self.bias,))
        sizes = device_ops.part_sizes(self.units, num)
        return [device_ops.split(bias, self.shard_devices[0], sizes)]

    def finish_shard(self, y: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        """Returns a shard's outputs: its product with bias, activation and shape."""
        y = keras.ops.add(y, *bias) if bias else y
        return self.activation(y) if self._is_elementwise else y


class QKVProjection(Dense):
    """Projects sequences for the heads of each device.

    Its files of weights are those of a `keras.layers.EinsumDense("abc,cde->abde")`: the
    kernel is `[features, num_heads, size]`, the output T parts `(batch, length,
    num_heads / T, size)`.

    Args:
        num_heads: Number of heads, a multiple of T.
        size: Size of each head's projection.
        **kwargs: Arguments of `TPDense`.
    """

    config_is_complete = True
    config_names = ("num_heads", "size", *_SHARED_NAMES)

    def __init__(self, num_heads: int, *, size: int, **kwargs: Any) -> None:
        super().__init__(num_heads * size, gather_output=False, **kwargs)
        self.num_heads, self.size = num_heads, size

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of each part."""
        heads = self.num_heads // self.num_shards
        return ((*input_shape[:-1], heads, self.size),) * self.num_shards

    def _kernel_axes(self, input_shape: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (input_shape[-1],), (self.num_heads, self.size)

    def finish_shard(self, y: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        """Returns a shard's outputs: its product with bias, activation and shape."""
        # Constants if sizes are known: of others XLA makes no reshape if the other
        # shard's device computes them.
        heads = self.num_heads // self.num_shards
        y = keras.ops.reshape(y, (*keras.ops.shape(y)[:-1], heads, self.size))
        return super().finish_shard(y, *bias)


class OutputProjection(Dense):
    """Projects the outputs of the heads on each device, and sums over heads.

    Its files of weights are those of a `keras.layers.EinsumDense("abcd,cde->abe")`: the
    kernel is `[num_heads, size, units]`, the input T parts `(batch, length,
    num_heads / T, size)`.

    Args:
        units: Size of the output.
        **kwargs: Arguments of `TPDense`.
    """

    config_is_complete = True
    config_names = ("units", *_SHARED_NAMES)

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(units, partition="row", **kwargs)

    def call(self, inputs: Sequence[tf.Tensor]) -> MaybeSharded:
        """Returns the projection, on the first device."""

        def merge_heads(x: tf.Tensor) -> tf.Tensor:
            heads, size = x.shape[-2:]
            return keras.ops.reshape(x, (*keras.ops.shape(x)[:-2], heads * size))

        return super().call(device_ops.on_each(self.shard_devices, merge_heads, inputs))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output."""
        return (*input_shape[0][:-2], self.units)

    def _kernel_axes(self, input_shape: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        *_, heads, size = input_shape[0]
        return (heads * self.num_shards, size), (self.units,)


@keras.saving.register_keras_serializable(package="tfgpipe")
class TPMLP(ShardedLayer):
    """A dense layer of columns, an activation, and a dense layer of rows.

    It computes what `keras.layers.Dense(hidden_units, activation)` followed by
    `keras.layers.Dense(units)` does. Each device has its part of the hidden units:
    there is one exchange before and one after (Megatron-LM, Shoeybi et al. 2019).

    Args:
        hidden_units: Size of the output of the first layer, a multiple of T.
        units: Size of the output.
        activation: Elementwise activation of the hidden units: a name, or a function
            of `keras.activations`.
        dropout: Share of outputs that is dropped in training, on the first device, so
            that the same are dropped for any T.
        seed: Seed of the dropout.
        collective: `"gather"`, `"ring"` or `"bidirectional_ring"`, of `TPDense`.
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are, or those of the
            pipeline around the layer.
        use_bias: True for biases in both layers.
        kernel_initializer: Initializer of full kernels.
        bias_initializer: Initializer of full biases.
        **kwargs: Arguments of `keras.layers.Layer`.

    Attributes:
        inner: Layer of columns, a `TPDense`.
        outer: Layer of rows, a `TPDense`.

    Input shape:
        `(batch, ..., features)`, or a tuple of T parts of it.

    Output shape:
        `(batch, ..., units)`.

    Example:

    >>> mlp = tfgpipe.layers.TPMLP(16, units=6, num_shards=2)
    >>> tuple(mlp(np.ones((3, 6), "float32")).shape)
    (3, 6)
    >>> [weight.name for weight in mlp.weights]
    ['kernel_0', 'kernel_1', 'bias_0', 'bias_1', 'kernel_0', 'kernel_1', 'bias']

    Raises:
        ValueError: If T does not divide the hidden units, or there are too few devices.
    """

    config_is_complete = True

    def __init__(
        self,
        hidden_units: int,
        *,
        units: int,
        activation: Any = "gelu",
        dropout: float = 0.0,
        seed: int | None = None,
        collective: Collective = "gather",
        num_shards: int | None = None,
        devices: Sequence[str] | None = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        **kwargs: Any,
    ) -> None:
        super().__init__(num_shards=num_shards, devices=devices, **kwargs)
        self.supports_masking = True
        common = {
            "collective": collective,
            "num_shards": num_shards,
            "devices": devices,
            "use_bias": use_bias,
            "kernel_initializer": kernel_initializer,
            "bias_initializer": bias_initializer,
            "dtype": self.dtype_policy,
        }
        self.inner = Dense(
            hidden_units,
            activation=activation,
            gather_output=False,
            name="inner",
            **common,
        )
        self.outer = Dense(units, partition="row", name="outer", **common)
        self.dropout = keras.layers.Dropout(dropout, seed=seed, dtype=self.dtype_policy)

    @property
    def max_shards(self) -> int:
        """Size that T divides: the hidden units."""
        return self.inner.max_shards

    def build(self, input_shape: Any) -> None:
        """Creates the layers' weights."""
        self.inner.build(input_shape)
        self.outer.build(self.inner.compute_output_shape(input_shape))

    def call(self, inputs: MaybeSharded, training: bool | None = None) -> Any:
        """Applies the layers."""
        return self.dropout(self.outer(self.inner(inputs)), training=training)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output."""
        return (*linear.outer(input_shape), self.outer.units)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        inner = self.inner.get_config()
        return {
            **super().get_config(),
            "hidden_units": self.inner.units,
            "units": self.outer.units,
            "dropout": self.dropout.rate,
            "seed": self.dropout.seed,
            **{name: inner[name] for name in ("activation", *_SHARED_NAMES)},
        }


def _is_elementwise(activation: Any) -> bool:
    name = keras.activations.serialize(activation)
    return (
        isinstance(name, str)
        and name not in _NOT_ELEMENTWISE
        and (keras.activations.get(name) is activation)
    )


def _by_fans(initializer: Any, num_inputs: int) -> Any:
    """Returns an initializer that draws kernels as Keras' EinsumDense does.

    It scales them by the sizes of inputs, the first `num_inputs` axes, and of units.
    """
    if not isinstance(initializer, keras.initializers.VarianceScaling):
        return initializer

    def draw(shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
        fans = math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:])
        return tf.reshape(initializer(fans, dtype=dtype), shape)

    return draw
