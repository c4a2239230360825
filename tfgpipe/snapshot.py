"""The variables of a pipeline as they are before a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfgpipe.stage import Stage, TracedStage


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Variables, by `id`, as they were before a step.

    Attributes:
        values: Their values.
        owners: The first stage that uses each.
        trainable: Those that are weights.
    """

    values: dict[int, tf.Tensor]
    owners: dict[int, int]
    trainable: tuple[int, ...]

    def weights(self) -> list[tf.Tensor]:
        """Returns the values of the weights."""
        return [self.values[key] for key in self.trainable]


def take(
    stages: Sequence[Stage], traced: Sequence[TracedStage], devices: Sequence[str]
) -> Snapshot:
    """Reads every variable, on the device of the first stage that uses it.

    Raises:
        ValueError: If two stages share a variable that one of them changes.
    """
    users: dict[int, list[int]] = {}
    values: dict[int, tf.Tensor] = {}
    for k, stage in enumerate(stages):
        for variable in (*stage.weights, *stage.state):
            if id(variable) not in values:
                with tf.device(devices[k]):
                    values[id(variable)] = tf.identity(variable.value)
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
    return Snapshot(values, owners, tuple(weights))
