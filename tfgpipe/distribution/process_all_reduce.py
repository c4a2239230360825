"""All-reduce over replicas that are processes of their own, one replica each.

Each process sees its own replica alone, so gradients of a stage are summed up by a
collective operation that runs on the stage's device, in each process: see `replicas`
for what such operations ask for.

Each process builds its own graph, and one may trace more often than another. So the
keys of these collectives depend only on what is the same in all processes whatever was
traced: stages, weights, and the order in which optimizers are first used.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

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
        self._next = _FIRST_INSTANCE
        self._keys: weakref.WeakKeyDictionary[
            keras.optimizers.Optimizer, dict[int, int]
        ] = weakref.WeakKeyDictionary()

    def for_weights(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: Iterable[keras.Variable],
    ) -> list[int]:
        """Returns a key for each weight, the same whenever they are asked for."""
        keys = self._keys.setdefault(optimizer, {})
        found = []
        for weight in weights:
            if id(weight) not in keys:
                keys[id(weight)] = self._next
                self._next += 1
            found.append(keys[id(weight)])
        return found


def stage_group_key(device: str, num_sums: int, specs: Iterable[tf.TensorSpec]) -> int:
    """Returns the group key of a stage whose collectives span processes.

    Stages that share it have variables of the same shapes, so that sums of one are
    never taken for those of another of different shape.

    Args:
        device: The stage's, in this process.
        num_sums: How many collectives a microbatch takes part in.
        specs: Shapes and types of the stage's variables.
    """
    found = tf.DeviceSpec.from_string(device)
    parts = [found.device_type, found.device_index, num_sums]
    parts += [(spec.dtype.name, tuple(spec.shape)) for spec in specs]
    return _FIRST_STAGE_GROUP + zlib.crc32(repr(parts).encode()) % _FIRST_STAGE_GROUP


def all_reduce_gradients(
    gradients: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    keys: Sequence[int],
) -> list[tf.Tensor]:
    """Returns gradients summed over all processes, each on its variable's device.

    All processes call this with gradients of the same variables, in the same order.

    Args:
        gradients: One of each variable.
        variables: The variables.
        keys: The instance key of each, as of `InstanceKeys`.
    """
    number = tf.distribute.get_strategy().num_replicas_in_sync
    summed = []
    for gradient, variable, key in zip(gradients, variables, keys, strict=True):
        # The index of a device in its process: one stage's in all of them.
        index = tf.DeviceSpec.from_string(variable.device).device_index
        with tf.device(variable.device):
            summed.append(
                tf.raw_ops.CollectiveReduceV2(
                    input=tf.convert_to_tensor(gradient),
                    group_size=number,
                    group_key=_FIRST_GROUP + index,
                    instance_key=key,
                    ordering_token=[ordering_token(f"gradients of processes {index}")],
                    merge_op="Add",
                    final_op="Id",
                )
            )
    return summed
