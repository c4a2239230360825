"""The variables of a pipeline as they are before a step.

Replicas have equal seeds, and would draw equal dropout masks for different rows. So
each starts a step from seeds of its own, the first from those that there are, and takes
back what it added when the step is through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.distribution import replica_context
from tfgpipe.stage import Stage, TracedStage

# Odd and far from any small multiple of itself, within the range of a seed.
_STRIDE = 0x1E3779B1


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Variables, by `id`, as they were before a step.

    Attributes:
        values: Their values.
        owners: The first stage that uses each.
        devices: Where each is.
        trainable: Those that are weights.
        shifts: What was added to seeds.
    """

    values: dict[int, tf.Tensor]
    owners: dict[int, int]
    devices: dict[int, str]
    trainable: tuple[int, ...]
    shifts: dict[int, tf.Tensor]

    def weights(self) -> list[tf.Tensor]:
        """Returns the values of the weights."""
        return [self.values[key] for key in self.trainable]


def take(
    stages: Sequence[Stage],
    traced: Sequence[TracedStage],
    devices: Sequence[Sequence[str]],
) -> Snapshot:
    """Reads every variable, on the device of the first stage that uses it.

    Args:
        stages: The K stages.
        traced: The same, traced.
        devices: For each stage, the devices of its shards.

    Raises:
        ValueError: If two stages share a variable that one of them changes.
    """
    users: dict[int, list[int]] = {}
    values: dict[int, tf.Tensor] = {}
    shifts: dict[int, tf.Tensor] = {}
    replica = replica_context.replica_number()
    others = not isinstance(replica, int) or replica > 0
    seeds = {
        id(v)
        for stage in stages
        for x in stage.layers
        for v in (keras_internals.seeds(x) if others else ())
    }
    places: dict[int, str] = {}
    for k, stage in enumerate(stages):
        numbers = stage.shards
        for variable in (*stage.weights, *stage.state):
            if id(variable) not in values:
                places[id(variable)] = devices[k][numbers.get(id(variable), 0)]
                with tf.device(places[id(variable)]):
                    value = tf.identity(variable.value)
                    if id(variable) in seeds:
                        shift = tf.cast(replica, tf.int64) * _STRIDE % 2**31
                        shifts[id(variable)] = tf.cast([shift, 0], value.dtype)
                        value += shifts[id(variable)]
                    values[id(variable)] = value
            users.setdefault(id(variable), []).append(k)
    for k, stage in enumerate(stages):
        for variable in traced[k].changed(stage.state):
            if len(users[id(variable)]) > 1:
                raise ValueError(
                    "Stages can share weights, but not what a step changes, since each "
                    "stage would advance it from the same value. Received "
                    f"'{variable.path}' in stages {users[id(variable)]}. Use a layer "
                    "of its own in each, or a `balance` that keeps them together."
                )
    owners = {key: first for key, (first, *_) in users.items()}
    weights = {id(v): None for stage in stages for v in stage.weights}
    return Snapshot(values, owners, places, tuple(weights), shifts)
