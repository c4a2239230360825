"""Dense layers whose columns or rows are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe._util import argument_checks
from tfgpipe.tensor_parallel import device_ops, linear
from tfgpipe.tensor_parallel.linear import DIRECTIONS, Collective, MaybeSharded
from tfgpipe.tensor_parallel.sharded_layer import ShardedLayer, check_divides

Partition = Literal["column", "row"]

# Activations that look at all units.
_NOT_BY_UNIT = ("softmax", "log_softmax", "sparsemax", "glu")


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
        gather_output: Whether the output is gathered on the first device. Else it is a
            tuple of T parts along the last axis, each where it was computed.
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are; in a pipeline
            it decides.
        activation: As of `keras.layers.Dense`. A function of your own is applied to
            gathered outputs, since it may look at all units.
        use_bias: Whether there is a bias. That of a row layer is on the first device
            alone.
        kernel_initializer: As of `keras.layers.Dense`: it draws the full kernel.
        bias_initializer: Likewise.
        **kwargs: Of the base layer.

    Input shape:
        `(batch, ..., features)`, or a tuple of T parts of it.

    Output shape:
        `(batch, ..., units)`, or a tuple of T parts of it.

    Raises:
        ValueError: If an argument is none of the choices, T does not divide what is
            split, or there are too few devices.
    """

    config_is_complete = True
    config_names = (
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
        self._by_unit = _is_by_unit(self.activation)
        if not (gather_output or self._by_unit):
            raise ValueError(
                "Outputs that stay in parts are activated part by part. Received "
                f"activation={keras.activations.serialize(self.activation)!r}, which "
                f"may look at all units, in layer '{self.name}' with "
                "gather_output=False. Gather the output, or apply it afterwards."
            )

    @property
    def max_shards(self) -> int:
        """T divides it: the units, or of `partition="row"` the input features."""
        if self.partition == "column":
            return int(self.units)
        return sum(part.shape[0] for part in self.kernel_parts)

    def build(self, input_shape: Any) -> None:
        """Creates the weights."""
        features = linear.width(input_shape)
        split_rows = self.partition == "row"
        if split_rows:
            check_divides("input features", features, self.num_shards, self.name)
        self.kernel_parts = self.add_sharded_weight(
            "kernel",
            (features, self.units),
            axis=0 if split_rows else 1,
            initializer=self.kernel_initializer,
        )
        if self.use_bias and split_rows:
            self.bias = self.add_full_weight(
                "bias", (self.units,), initializer=self.bias_initializer
            )
        elif self.use_bias:
            self.bias_parts = self.add_sharded_weight(
                "bias", (self.units,), axis=0, initializer=self.bias_initializer
            )

    def call(self, inputs: MaybeSharded) -> MaybeSharded:
        """Returns the output of the dense layer, full or sharded."""
        devices = self.shard_devices
        product = linear.column if self.partition == "column" else linear.row
        outputs = product(
            inputs, self.values(self.kernel_parts), devices, self.collective
        )
        terms = list(outputs) if linear.is_sharded(outputs) else [outputs]
        biases = self._biases(len(terms))

        def finish(y: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
            y = keras.ops.add(y, *bias) if bias else y
            return self.activation(y) if self._by_unit else y

        results = device_ops.on_each(devices[: len(terms)], finish, terms, *biases)
        outputs = results if linear.is_sharded(outputs) else results[0]
        if not self.gather_output:
            return tuple(linear.scatter(outputs, devices))
        outputs = linear.full(outputs, devices)
        if self._by_unit:
            return outputs
        return device_ops.on(devices[0], self.activation, outputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output, or of each of its parts."""
        before = linear.outer(input_shape)
        if self.gather_output:
            return (*before, self.units)
        return ((*before, self.units // self.num_shards),) * self.num_shards

    def _biases(self, num: int) -> list[list[tf.Tensor]]:
        """Returns the bias in a list of `num` parts, or nothing."""
        if not self.use_bias:
            return []
        if self.partition == "column":
            return [self.values(self.bias_parts)]
        device = self.shard_devices[0]
        bias = self.value(self.bias, device)
        return [device_ops.split(bias, device, device_ops.part_sizes(self.units, num))]


@keras.saving.register_keras_serializable(package="tfgpipe")
class TPMLP(ShardedLayer):
    """A dense layer of columns, an activation, and a dense layer of rows.

    It computes what `keras.layers.Dense(hidden_units, activation)` followed by
    `keras.layers.Dense(units)` does. Each device has its part of the hidden units:
    there is one exchange before and one after (Megatron-LM, Shoeybi et al. 2019).

    Args:
        hidden_units: Size of the output of the first layer. T divides it.
        units: Size of the output.
        activation: Of the hidden units, one by one: by name, or of `keras.activations`.
        dropout: The share of outputs that is dropped in training, on the first device,
            so that the same are dropped whatever T is.
        seed: Of the dropout.
        collective: As of `TPDense`.
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are; in a pipeline
            it decides.
        use_bias: Whether the layers have biases.
        kernel_initializer: As of `keras.layers.Dense`: it draws full kernels.
        bias_initializer: Likewise.
        **kwargs: Of the base layer.

    Attributes:
        inner: The layer of columns, a `TPDense`.
        outer: The layer of rows, likewise.

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
        ValueError: As of `TPDense`.
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
        """T divides it: the hidden units."""
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
        shared = ("collective", "use_bias", "activation")
        initializers = ("kernel_initializer", "bias_initializer")
        return {
            **super().get_config(),
            "hidden_units": self.inner.units,
            "units": self.outer.units,
            "dropout": self.dropout.rate,
            "seed": self.dropout.seed,
            **{name: inner[name] for name in (*shared, *initializers)},
        }


def _is_by_unit(activation: Any) -> bool:
    """Returns whether an activation is one that treats units one by one."""
    name = keras.activations.serialize(activation)
    return (
        isinstance(name, str)
        and name not in _NOT_BY_UNIT
        and (keras.activations.get(name) is activation)
    )
