"""The base of sharded layers: weights in parts on devices, full weights in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.capture import TracingScope
from tfgpipe.devices import default_devices, make_mesh, sharding
from tfgpipe.tensor_parallel import device_ops


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
            tensors. Defaults to the first T GPUs, or without GPUs logical CPUs. In a
            pipeline the pipeline decides.
        **kwargs: Of the base layer.

    Raises:
        ValueError: If there are fewer devices than shards, or one is not there.
    """

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
        # In a tuple TensorFlow's checkpoints find them.
        self.weight_parts: tuple[keras.Variable, ...] = ()

    @property
    def sharded_weights(self) -> Sequence[sharding.ShardedWeight]:  # type: ignore[override]
        """The weights in parts. Others are on the first device."""
        return [entry.weight for entry in self.layout.entries if entry.sharded]

    @property
    def shard_devices(self) -> tuple[str, ...]:
        """The device of each shard where the layer is being called."""
        if isinstance(keras_internals.current_stateless_scope(), TracingScope):
            return tuple(map(sharding.placeholder_device, range(self.num_shards)))
        return self._devices

    def add_sharded_weight(
        self, name: str, shape: Sequence[int], *, axis: int, initializer: Any
    ) -> tuple[keras.Variable, ...]:
        """Adds a weight in T parts.

        The full initial value is drawn, so that it does not depend on T. A size that T
        does not divide is padded with zeros.

        Args:
            name: The name of the full weight.
            shape: Its shape.
            axis: The axis along which it is split.
            initializer: Draws the full value.
        """
        num = self.num_shards
        initializers = _part_initializers(initializer, tuple(shape), axis, num)
        part_shape = (*shape[:axis], -(-shape[axis] // num), *shape[axis + 1 :])
        parts = []
        for t, device in enumerate(self._devices):
            with tf.device(device):
                variable = self.add_weight(
                    name=f"{name}_{t}", shape=part_shape, initializer=initializers[t]
                )
            parts.append(variable)
        weight = sharding.ShardedWeight(name, tuple(parts), axis)
        self.layout.entries.append(_Entry(weight, tuple(shape), sharded=True))
        self.weight_parts = (*self.weight_parts, *parts)
        return weight.parts

    def add_full_weight(
        self, name: str, shape: Sequence[int], *, initializer: Any
    ) -> keras.Variable:
        """Adds a weight that is not split, on the first device."""
        with tf.device(self._devices[0]):
            variable = self.add_weight(
                name=name, shape=tuple(shape), initializer=initializer
            )
        weight = sharding.ShardedWeight(name, (variable,), 0)
        self.layout.entries.append(_Entry(weight, tuple(shape), sharded=False))
        return variable

    def values(self, parts: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Returns weights in the type to compute in, each on its device."""
        return [
            self.value(variable, device)
            for variable, device in zip(parts, self.shard_devices, strict=True)
        ]

    def value(
        self, variable: keras.Variable, device: str, dtype: str | None = None
    ) -> tf.Tensor:
        """Returns a weight in the type to compute in, cast where it is.

        By itself Keras casts it, and its gradient back, on no device in particular.
        """
        dtype = self.compute_dtype if dtype is None else dtype
        with keras_internals.without_autocast(), tf.device(device):
            value = tf.convert_to_tensor(variable.value)
        if value.dtype == dtype:
            return value
        return device_ops.on(device, lambda x: tf.cast(x, dtype), value)

    def save_own_variables(self, store: Any) -> None:
        """Stores the full weights."""
        for number, entry in enumerate(self.layout.entries):
            store[str(number)] = entry.full()

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Loads full weights.

        Raises:
            ValueError: If they are of another layer, or the layer is not built.
        """
        entries = self.layout.entries
        if len(store) != len(entries):
            raise ValueError(
                f"Layer '{self.name}' has {len(entries)} weights, whole ones counted. "
                f"Received a file with {len(store)} for it. Build the layer first, by "
                "a call or an `Input`, with the arguments it was saved with."
            )
        for number, entry in enumerate(entries):
            entry.assign(np.asarray(store[str(number)]), self.name)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        devices = None if self.devices is None else list(self.devices)
        return {
            **super().get_config(),
            "num_shards": self.num_shards,
            "devices": devices,
        }


def full_weights(layer: keras.layers.Layer) -> list[np.ndarray]:
    """Returns the weights of a layer or model as of one without shards.

    What `get_weights` is to a model of `keras.layers.Dense`, this is to the model with
    `TPDense` in its place: `plain.set_weights(full_weights(sharded))`.

    Args:
        layer: A layer or model with sharded layers inside, or without.
    """
    return [entry.full() for entry in _entries(layer)]


def set_full_weights(layer: keras.layers.Layer, weights: Sequence[np.ndarray]) -> None:
    """Sets the weights of a layer or model to those of one without shards.

    Args:
        layer: A layer or model with sharded layers inside, built.
        weights: What `get_weights` of the plain one returns, or `full_weights` of one
            with another number of shards.

    Raises:
        ValueError: If there are more or fewer, or one has another shape.
    """
    entries = _entries(layer)
    if len(entries) != len(weights):
        raise ValueError(
            f"'{layer.name}' has {len(entries)} weights, each counted whole. Received "
            f"{len(weights)}. Build it first, and give those of a layer that is alike."
        )
    for entry, value in zip(entries, weights, strict=True):
        entry.assign(np.asarray(value), layer.name)


def even(what: str, size: int, num_shards: int, name: str) -> int:
    """Returns the size of each shard's part.

    Raises:
        ValueError: If the number of shards does not divide the size.
    """
    share, rest = divmod(size, num_shards)
    if rest:
        near = [n * num_shards for n in (share, share + 1) if n]
        raise ValueError(
            f"Each shard gets as many {what} as the others. Received {size} {what} and "
            f"num_shards={num_shards} in layer '{name}'. The nearest numbers of {what} "
            f"are {' and '.join(map(str, near))}; or take another number of shards."
        )
    return share


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A weight, and its full shape."""

    weight: sharding.ShardedWeight
    shape: tuple[int, ...]
    sharded: bool

    def full(self) -> np.ndarray:
        """Returns the full value, without padding."""
        arrays = [keras.ops.convert_to_numpy(p.value) for p in self.weight.parts]
        joined = np.concatenate(arrays, self.weight.axis) if self.shape else arrays[0]
        return joined[tuple(map(slice, self.shape))]

    def assign(self, value: np.ndarray, owner: str) -> None:
        """Sets the parts to those of a full value."""
        if value.shape != self.shape:
            raise ValueError(
                f"Weight '{self.weight.name}' of '{owner}' has the shape {self.shape} "
                f"as a whole. Received {value.shape}. Was it saved by a layer with "
                "other arguments?"
            )
        pieces = _split(value, self.weight.axis, len(self.weight.parts), np.pad)
        for part, piece in zip(self.weight.parts, pieces, strict=True):
            part.assign(piece)


@dataclasses.dataclass
class _Layout:
    """The weights of a layer in order, where Keras does not look for variables."""

    entries: list[_Entry] = dataclasses.field(default_factory=list)


def _part_initializers(
    initializer: Any, shape: tuple[int, ...], axis: int, num: int
) -> list[Callable[..., tf.Tensor]]:
    """Returns the initializers of parts, which draw the full value once for all.

    Args:
        initializer: Draws the full value.
        shape: Its shape.
        axis: The axis along which it is split.
        num: The number of parts.
    """
    draw = keras.initializers.get(initializer)
    parts: list[tf.Tensor | None] = [None] * num

    def of_part(t: int) -> Callable[..., tf.Tensor]:
        def initialize(part_shape: Any, dtype: Any = None) -> tf.Tensor:
            if parts[t] is None:
                # Keras may ask while it traces; another part may be asked for later.
                with tf.init_scope():
                    parts[:] = _split(draw(shape, dtype=dtype), axis, num, tf.pad)
            part, parts[t] = parts[t], None
            return part

        return initialize

    return [of_part(t) for t in range(num)]


def _split(full: Any, axis: int, num: int, pad: Callable[..., Any]) -> list[Any]:
    """Returns equal parts of an array or tensor, padded with zeros as need be."""
    size = -(-full.shape[axis] // num)
    missing = size * num - full.shape[axis]
    if missing:
        widths = [(0, missing if i == axis else 0) for i in range(len(full.shape))]
        full = pad(full, widths)
    before = (slice(None),) * axis
    return [full[(*before, slice(t * size, (t + 1) * size))] for t in range(num)]


def _entries(layer: keras.layers.Layer) -> list[_Entry]:
    known = {
        id(part): entry
        for inner in keras_internals.inner_layers(layer)
        if isinstance(inner, ShardedLayer)
        for entry in inner.layout.entries
        for part in entry.weight.parts
    }
    found: dict[int, _Entry] = {}
    for variable in layer.weights:
        entry = known.get(id(variable))
        if entry is None:
            weight = sharding.ShardedWeight(variable.name, (variable,), 0)
            entry = _Entry(weight, tuple(variable.shape), sharded=False)
        found[id(entry)] = entry
    return list(found.values())


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
