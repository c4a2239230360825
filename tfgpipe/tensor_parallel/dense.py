"""A dense layer whose columns, or rows, are on T devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe._util import check_choice
from tfgpipe.tensor_parallel import device_ops, linear
from tfgpipe.tensor_parallel.linear import DIRECTIONS, Collective, MaybeSharded
from tfgpipe.tensor_parallel.sharded_layer import ShardedLayer, even

Partition = Literal["column", "row"]

# Those that look at all units at once.
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
        self.units = units
        self.partition = check_choice("partition", partition, ("column", "row"))
        self.collective = check_choice("collective", collective, [*DIRECTIONS])
        self.gather_output = gather_output
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.supports_masking = True
        if partition == "column" or not gather_output:
            even("units", units, self.num_shards, self.name)
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
        """Makes the weights."""
        features = width(input_shape)
        split_rows = self.partition == "row"
        if split_rows:
            even("input features", features, self.num_shards, self.name)
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
        finish = _add_and(self.activation if self._by_unit else _unchanged)
        made = [
            device_ops.on(device, finish, *given)
            for device, *given in zip(
                devices[: len(terms)], terms, *biases, strict=True
            )
        ]
        outputs = made if linear.is_sharded(outputs) else made[0]
        if not self.gather_output:
            return tuple(linear.scatter(outputs, devices))
        outputs = linear.full(outputs, devices)
        if self._by_unit:
            return outputs
        return device_ops.on(devices[0], self.activation, outputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output, or of each of its parts."""
        before = outer(input_shape)
        if self.gather_output:
            return (*before, self.units)
        return ((*before, self.units // self.num_shards),) * self.num_shards

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Passes a mask on, for each part if the output is sharded."""
        mask = previous_mask[0] if linear.is_sharded(inputs) else previous_mask
        return mask if self.gather_output else (mask,) * self.num_shards

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "units": self.units,
            "partition": self.partition,
            "collective": self.collective,
            "gather_output": self.gather_output,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Dense:
        """Makes a layer from what `get_config` returned."""
        return cls(**linear.with_collective(config))

    def _biases(self, num: int) -> list[list[tf.Tensor]]:
        """Returns the bias in a list of `num` parts, or nothing."""
        if not self.use_bias:
            return []
        if self.partition == "column":
            return [self.values(self.bias_parts)]
        device = self.shard_devices[0]
        bias = self.value(self.bias, device)
        return [device_ops.split(bias, device, device_ops.part_sizes(self.units, num))]


def width(shape: Any) -> int:
    """Returns the size of the last axis of a tensor, full or sharded."""
    return sum(s[-1] for s in shape) if _of_parts(shape) else shape[-1]


def outer(shape: Any) -> tuple[int | None, ...]:
    """Returns the sizes of the other axes."""
    return tuple(shape[0][:-1] if _of_parts(shape) else shape[:-1])


def _of_parts(shape: Any) -> bool:
    return isinstance(shape[0], (tuple, list))


def _is_by_unit(activation: Any) -> bool:
    """Returns whether an activation is one that treats units one by one."""
    name = keras.activations.serialize(activation)
    return (
        isinstance(name, str)
        and name not in _NOT_BY_UNIT
        and (keras.activations.get(name) is activation)
    )


def _add_and(activation: Callable[[Any], Any]) -> Callable[..., tf.Tensor]:
    """Returns what is done to a product: a bias is added, if there is one."""

    def finish(y: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        return activation(keras.ops.add(y, *bias) if bias else y)

    return finish


def _unchanged(y: tf.Tensor) -> tf.Tensor:
    return y
