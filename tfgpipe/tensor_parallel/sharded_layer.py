"""The base of sharded layers: weights in parts on devices, full weights in files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.capture import TracingScope
from tfgpipe.devices import default_devices, make_mesh, sharding
from tfgpipe.tensor_parallel import device_ops, linear


class ShardedLayer(keras.layers.Layer, sharding.Sharded):
    """A layer with weights in T parts, each on a device of its own.

    Files of weights hold full weights, in the order and layout of Keras' layer: what is
    saved with T = 4 loads with T = 1, and into that layer. Keras names groups in such
    files after classes, so a class has the name of Keras' layer, and `tfgpipe.layers`
    has it as `TP...`.

    Optimizers keep slots for each part, so those, and `tf.train.Checkpoint`, restore
    with the same T only.

    Args:
        num_shards: T. Defaults to the number of devices.
        devices: Names of T devices such as `"GPU:0"`, the first of which gets full
            tensors. Defaults to the first T GPUs, or without GPUs logical CPUs; in a
            pipeline to those of the pipeline.
        **kwargs: Arguments of `keras.layers.Layer`.

    Raises:
        ValueError: If there are fewer devices than shards, or one is not there.
    """

    # The constructor's other arguments, each an attribute.
    config_names: ClassVar[tuple[str, ...]] = ()
    # Whether the output is full, on the first device, or a tuple of T parts.
    gather_output: bool = True
    # In a tuple TensorFlow's checkpoints find them.
    weight_parts: tuple[keras.Variable, ...] = ()

    def __init__(
        self,
        *,
        num_shards: int | None = None,
        devices: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA compiles for one device.
        self.devices = None if devices is None else tuple(devices)
        self._devices = choose_devices(num_shards, devices)
        self.num_shards = len(self._devices)
        self.layout = _Layout()

    @property
    def sharded_weights(self) -> Sequence[sharding.ShardedWeight]:  # type: ignore[override]
        """The weights in parts. Others are on the first device."""
        return [weight for weight in self.layout.weights if weight.is_sharded]

    @property
    def shard_devices(self) -> tuple[str, ...]:
        """The device of each shard where the layer is being called."""
        if isinstance(keras_internals.calls.current_stateless_scope(), TracingScope):
            return tuple(map(sharding.placeholder_device, range(self.num_shards)))
        return self._devices

    def add_parts(
        self,
        name: str,
        shape: Sequence[int],
        *,
        axis: int | None,
        initializer: Any,
    ) -> tuple[keras.Variable, ...]:
        """Adds a weight in T parts, or in one on the first device.

        The full initial value is drawn, so that it does not depend on T. A size that T
        does not divide is padded with zeros.

        Args:
            name: Name of the full weight.
            shape: Shape of the full weight.
            axis: Axis along which it is split, or None for a weight in one part.
            initializer: Initializer of the full weight.
        """
        spec = _Weight(name, (), 0 if axis is None else axis, tuple(shape))
        num = 1 if axis is None else self.num_shards
        draw = keras.initializers.get(initializer)

        @functools.cache
        def draw_parts(dtype: Any) -> list[tf.Tensor]:
            # Keras may ask while it traces; another part may be asked for later.
            with tf.init_scope():
                return _split(draw(spec.shape, dtype=dtype), spec.axis, num)

        def initializer_of(t: int) -> Callable[..., tf.Tensor]:
            return lambda _, dtype=None: draw_parts(dtype)[t]

        parts = []
        for t, device in enumerate(self._devices[:num]):
            with tf.device(device):
                variable = self.add_weight(
                    name=name if axis is None else f"{name}_{t}",
                    shape=_part_shape(spec.full_shape, spec.axis, num),
                    initializer=draw if axis is None else initializer_of(t),
                )
            parts.append(variable)
        is_sharded = axis is not None
        weight = dataclasses.replace(spec, parts=tuple(parts), is_sharded=is_sharded)
        self.layout.weights.append(weight)
        if is_sharded:
            self.weight_parts = (*self.weight_parts, *parts)
        return weight.parts

    def values(
        self, parts: Sequence[keras.Variable], dtype: str | None = None
    ) -> list[tf.Tensor]:
        """Returns the parts of a weight, each on its device and cast there.

        To the compute dtype by default.
        By itself Keras casts them, and gradients back, on no device in particular.
        """
        dtype = self.compute_dtype if dtype is None else dtype
        values = []
        for variable, device in zip(parts, self.shard_devices, strict=False):
            with keras_internals.calls.without_autocast(), tf.device(device):
                value = tf.convert_to_tensor(variable.value)
            if value.dtype != dtype:
                value = device_ops.on(device, lambda x: tf.cast(x, dtype), value)
            values.append(value)
        return values

    def copies_of(
        self, variables: Sequence[keras.Variable], num: int, *, casts: bool = True
    ) -> list[list[tf.Tensor]]:
        """Returns copies of whole weights, all of a copy in a list.

        They are on the first device, where their gradients are summed.

        Args:
            variables: The weights.
            num: Number of copies.
            casts: True for copies in the compute dtype.
        """
        copies = [
            device_ops.copy(value, self.shard_devices[0], num)
            for variable in variables
            for value in self.values((variable,), None if casts else variable.dtype)
        ]
        return [list(some) for some in zip(*copies, strict=True)] or [[]] * num

    def save_own_variables(self, store: Any) -> None:
        """Stores the full weights."""
        for i, weight in enumerate(self.layout.weights):
            store[str(i)] = weight.full()

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Loads full weights.

        Raises:
            ValueError: If they are of another layer, or the layer is not built.
        """
        weights = self.layout.weights
        if len(store) != len(weights):
            raise ValueError(
                f"Layer '{self.name}' has {len(weights)} full weights. "
                f"Received a file with {len(store)} for it. Build the layer first, by "
                "a call or an `Input`, with the arguments it was saved with."
            )
        for i, weight in enumerate(weights):
            weight.assign(np.asarray(store[str(i)]), self.name)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Passes a mask on, for each part if the output is sharded."""
        mask = previous_mask[0] if linear.is_sharded(inputs) else previous_mask
        return mask if self.gather_output else (mask,) * self.num_shards

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "num_shards": self.num_shards,
            "devices": None if self.devices is None else list(self.devices),
            **{n: _serialized(n, getattr(self, n)) for n in self.config_names},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ShardedLayer:
        """Creates a layer from what `get_config` returned.

        Files before version 0.2 have `mode`, "sync" or "ring", and `ring`, "one_way" or
        "both_ways", in place of `collective`.
        """
        config = dict(config)
        mode, ring = config.pop("mode", None), config.pop("ring", None)
        if mode is not None:
            ring = "bidirectional_ring" if ring == "both_ways" else "ring"
            config["collective"] = ring if mode == "ring" else "gather"
        return cls(**config)


def full_weights(layer: keras.layers.Layer) -> list[np.ndarray]:
    """Returns the weights of a layer or model as of one without shards.

    What `get_weights` is to a model of `keras.layers.Dense`, this is to the model with
    `TPDense` in its place: `plain.set_weights(full_weights(sharded))`.

    Args:
        layer: A layer or model with sharded layers inside, or without.
    """
    return [weight.full() for weight in sharding.full_variables(layer, layer.weights)]


def set_full_weights(layer: keras.layers.Layer, weights: Sequence[np.ndarray]) -> None:
    """Sets the weights of a layer or model to those of one without shards.

    Args:
        layer: A layer or model with sharded layers inside, built.
        weights: Full weights: of `get_weights` of the plain layer or model, or of
            `full_weights` of one with another number of shards.

    Raises:
        ValueError: If there are more or fewer, or one has another shape.
    """
    own = sharding.full_variables(layer, layer.weights)
    if len(own) != len(weights):
        raise ValueError(
            f"'{layer.name}' has {len(own)} full weights. Received {len(weights)}. "
            "Build it first, and give those of a layer of the same structure."
        )
    for weight, value in zip(own, weights, strict=True):
        weight.assign(np.asarray(value), layer.name)


def check_divides(what: str, size: int, num_shards: int, name: str) -> None:
    """Raises ValueError if the number of shards does not divide a size."""
    below = size - size % num_shards
    if below != size:
        near = [n for n in (below, below + num_shards) if n]
        raise ValueError(
            f"Each shard gets as many {what} as the others. Received {size} {what} and "
            f"num_shards={num_shards} in layer '{name}'. The nearest numbers of {what} "
            f"are {' and '.join(map(str, near))}; or take another number of shards."
        )


def check_sequences(what: str, name: str, *shapes: Any) -> None:
    """Raises ValueError unless shapes are `(batch, length, features)`."""
    for shape in shapes:
        if len(shape) != 3:
            raise ValueError(
                f"{what} are split over devices within sequences, `(batch, length, "
                f"features)`. Layer '{name}' received the shape {tuple(shape)}. "
                "Reshape it to one axis of positions."
            )


@dataclasses.dataclass(frozen=True)
class _Weight(sharding.ShardedWeight):
    """A weight, sharded or in one part."""

    is_sharded: bool = False


@dataclasses.dataclass
class _Layout:
    """The weights of a layer in order, where Keras does not look for variables."""

    weights: list[_Weight] = dataclasses.field(default_factory=list)


def _part_shape(shape: tuple[int, ...], axis: int, num: int) -> tuple[int, ...]:
    return tuple(-(-n // num) if i == axis else n for i, n in enumerate(shape))


def _split(full: Any, axis: int, num: int) -> list[tf.Tensor]:
    """Returns equal parts of a tensor, padded with zeros as need be."""
    size = _part_shape(full.shape, axis, num)[axis]
    missing = size * num - full.shape[axis]
    if missing:
        widths = [(0, missing if i == axis else 0) for i in range(len(full.shape))]
        full = tf.pad(full, widths)
    outer = (slice(None),) * axis
    return [full[(*outer, slice(t * size, (t + 1) * size))] for t in range(num)]


def _serialized(name: str, value: Any) -> Any:
    """Returns a constructor's argument as `get_config` has it."""
    if name.endswith("initializer"):
        return keras.initializers.serialize(value)
    return keras.activations.serialize(value) if name == "activation" else value


def choose_devices(
    num_shards: int | None, devices: Sequence[str] | None
) -> tuple[str, ...]:
    """Returns the devices of T shards."""
    if num_shards is not None and (not isinstance(num_shards, int) or num_shards < 1):
        raise ValueError(
            "`num_shards` must be an integer of at least 1, or None for one shard a "
            f"device. Received {num_shards!r}."
        )
    there = default_devices() if devices is None else list(devices)
    T = len(there) if num_shards is None else num_shards
    if len(there) < T:
        raise ValueError(
            "Each shard of a layer has a device of its own. Received "
            f"num_shards={T} and {len(there)} devices: {', '.join(there)}. Use fewer "
            "shards, or make logical devices before TensorFlow starts: "
            f"`tfgpipe.make_logical_cpus({T})`."
        )
    return make_mesh(num_stages=T, devices=devices).primary_devices[0]
