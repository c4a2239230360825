"""Device placement of tensor-parallel layers: where each shard is.

Such a layer has T shards of each of its weights and computes with each shard on its
device. By itself it knows T devices. In a stage it must name none, since a stage is
traced once for all replicas: there shard `t` is on the placeholder device `SHARD:t`
until a function is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, layer_names, text_table, unique
from tfgpipe.devices import mesh

_TYPE = "SHARD"


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A weight in T shards.

    Attributes:
        name: Name of the weight in the layer without shards.
        parts: The shards.
        axis: The axis along which the weight is split.
        shape: The shape of the full weight, if the last shard is padded with zeros.
    """

    name: str
    parts: tuple[keras.Variable, ...]
    axis: int
    shape: tuple[int, ...] | None = None

    @property
    def path(self) -> str:
        """The path of the first shard."""
        return str(self.parts[0].path)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of the shards side by side."""
        shape = list(self.parts[0].shape)
        if shape:
            shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full weight."""
        return self.padded_shape if self.shape is None else self.shape

    def full(self) -> np.ndarray:
        """Returns the full value."""
        arrays = [keras.ops.convert_to_numpy(part.value) for part in self.parts]
        joined = np.concatenate(arrays, self.axis) if self.full_shape else arrays[0]
        return joined[tuple(map(slice, self.full_shape))]

    def assign(self, value: np.ndarray, layer: str) -> None:
        """Sets the shards to those of a full value.

        Raises:
            ValueError: If it has another shape; it names the layer.
        """
        if value.shape != self.full_shape:
            raise ValueError(
                f"Weight '{self.name}' of '{layer}' has the full shape "
                f"{self.full_shape}. Received {value.shape}. Was it saved by a layer "
                "with other arguments?"
            )
        shards = [value]
        if value.shape:
            missing = zip(self.padded_shape, value.shape, strict=True)
            padded = np.pad(value, [(0, n - m) for n, m in missing])
            ends = np.cumsum([part.shape[self.axis] for part in self.parts])
            shards = np.split(padded, ends[:-1], self.axis)
        for part, each in zip(self.parts, shards, strict=True):
            part.assign(each)


class Sharded:
    """A layer that splits weights over devices.

    Attributes:
        num_shards: T.
        sharded_weights: The weights that are split. Others are on the first shard.
    """

    num_shards: int
    sharded_weights: Sequence[ShardedWeight]


def placeholder_device(shard: int) -> str:
    """Returns the placeholder device of a shard.

    >>> placeholder_device(2)
    '/device:SHARD:2'
    """
    return f"/device:{_TYPE}:{shard}"


def shard_index(device: str) -> int | None:
    """Returns the shard of a placeholder device, or None for another name.

    >>> shard_index(placeholder_device(2))
    2
    """
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_index if spec.device_type == _TYPE else None


def shard_scope(shard: int) -> contextlib.AbstractContextManager[Any]:
    """Returns the device scope of a shard, inside a stage.

    The first shard's is the stage's primary device, as for operations without one.
    """
    return tf.device(placeholder_device(shard)) if shard else contextlib.nullcontext()


def sharded_layers(layers: Iterable[Any]) -> list[Any]:
    """Returns the layers that are sharded among some and all those inside them."""
    inner = [x for layer in layers for x in keras_internals.layers.inner_layers(layer)]
    return [x for x in inner if isinstance(x, Sharded)]


def num_shards(layers: Iterable[Any]) -> int:
    """Returns T, how many shards layers are split into; 1 if none is.

    Raises:
        ValueError: If layers differ in it.
    """
    found = {each.num_shards: each for each in sharded_layers(layers)}
    found.pop(1, None)
    if len(found) > 1:
        some = ", ".join(f"{t} of '{each.name}'" for t, each in found.items())
        raise ValueError(
            "All layers of a pipeline that are sharded have equally many shards, one "
            f"on each device of a stage. Received {some}. Give them one `num_shards`."
        )
    return next(iter(found), 1)


def full_variables(
    layer: keras.layers.Layer, variables: Iterable[keras.Variable]
) -> list[ShardedWeight]:
    """Returns variables of a layer or model as of one without shards.

    Args:
        layer: A layer or model with sharded layers inside, or without.
        variables: Some of its variables, or all.
    """
    sharded = IdentityMap(
        (part, weight)
        for each in sharded_layers([layer])
        for weight in each.sharded_weights
        for part in weight.parts
    )
    return unique(
        sharded[v] if v in sharded else ShardedWeight(v.name, (v,), 0)
        for v in variables
    )


def sharding_spec(weight: ShardedWeight) -> mesh.ShardingSpec:
    """Describes the sharding of a weight."""
    rank = len(weight.parts[0].shape)
    axis = weight.axis % rank
    return mesh.ShardingSpec(*("shard" if i == axis else None for i in range(rank)))


def sharding_table(layers: Iterable[Any]) -> str:
    """Returns a table of sharded weights: one line for all layers that are alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for layer in sharded_layers(layers):
        for weight in layer.sharded_weights:
            size = max(math.prod(part.shape) for part in weight.parts)
            row = (
                f"{type(layer).__name__}.{weight.name}",
                " x ".join(map(str, weight.padded_shape)),
                str(sharding_spec(weight)),
                f"{size:,}",
            )
            alike.setdefault(row, []).append(layer.name)
    if not alike:
        return ""
    rows = [(*row, layer_names(names)) for row, names in alike.items()]
    header = ("sharded weight", "shape", "axes", "numbers each", "layers")
    return text_table(header, rows, left=("sharded weight", "axes", "layers"))


def shard_indices(layers: Iterable[Any]) -> IdentityMap[keras.Variable, int]:
    """Returns for each shard of a weight its index."""
    return IdentityMap(
        (part, t)
        for layer in sharded_layers(layers)
        for weight in layer.sharded_weights
        for t, part in enumerate(weight.parts)
    )
