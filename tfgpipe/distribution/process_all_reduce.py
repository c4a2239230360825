"""All-reduce over replicas that are processes of their own, one replica each.

Each process sees its own replica alone, so gradients of a stage are summed by a
collective operation that runs on the stage's device, in each process: see
`stage_collectives` for what such operations need.

Each process builds its own graph, and one may trace more often than another. So the
keys of these collectives depend only on what is the same in all processes whatever was
traced: stages, weights, and the order in which optimizers are first used.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Iterable

import keras
import tensorflow as tf

from tfgpipe._util import IdentityMap
from tfgpipe.devices import ordering_token

# Disjoint from the keys of TensorFlow's own collectives, which count from 1, and from
# those of collectives inside stages.
_FIRST_GROUP = 1_000_000
_FIRST_INSTANCE = 1_000_000
# Group keys of stages are from here to the last that there is.
_FIRST_STAGE_GROUP = 1 << 30


class InstanceKeys:
    """Instance keys of gradient all-reduces: one for each weight of each optimizer."""

    def __init__(self) -> None:
        self._unused = itertools.count(_FIRST_INSTANCE)
        self._keys: weakref.WeakKeyDictionary[
            keras.optimizers.Optimizer, IdentityMap[keras.Variable, int]
        ] = weakref.WeakKeyDictionary()

    def for_weights(
        self, optimizer: keras.optimizers.Optimizer, weights: Iterable[keras.Variable]
    ) -> list[int]:
        """Returns a key for each weight, the same whenever they are asked for."""
        keys = self._keys.setdefault(optimizer, IdentityMap())
        for weight in (weights := list(weights)):
            if weight not in keys:
                keys[weight] = next(self._unused)
        return [keys[weight] for weight in weights]


def stage_group_key(device: str, num_sums: int, specs: Iterable[tf.TensorSpec]) -> int:
    """Returns the group key of a stage whose collectives span processes.

    Stages that share it have variables of the same shapes, so that sums of one are
    never taken for those of another of different shape.

    Args:
        device: The stage's, in this process.
        num_sums: How many collectives a microbatch takes part in.
        specs: Shapes and types of the stage's variables.
    """
    place = tf.DeviceSpec.from_string(device)
    content = [place.device_type, place.device_index, num_sums]
    content += [(spec.dtype.name, tuple(spec.shape)) for spec in specs]
    return _FIRST_STAGE_GROUP + zlib.crc32(repr(content).encode()) % _FIRST_STAGE_GROUP


def all_reduce_gradient(
    gradient: tf.Tensor, variable: tf.Variable, key: int
) -> tf.Tensor:
    """Returns a gradient summed over all processes, on its variable's device.

    All processes call this for the same variables, in the same order.

    Args:
        gradient: The gradient in this process.
        variable: The variable.
        key: The instance key, as of `InstanceKeys`.
    """
    # The index of a device in its process: one stage's in all of them.
    index = tf.DeviceSpec.from_string(variable.device).device_index
    with tf.device(variable.device):
        return tf.raw_ops.CollectiveReduceV2(
            input=tf.convert_to_tensor(gradient),
            group_size=tf.distribute.get_strategy().num_replicas_in_sync,
            group_key=_FIRST_GROUP + index,
            instance_key=key,
            ordering_token=[ordering_token(f"gradients of processes {index}")],
            merge_op="Add",
            final_op="Id",
        )
