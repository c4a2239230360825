"""The variables of a pipeline as they are before a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
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
    owners: dict[int, int] = {}
    values: dict[int, tf.Tensor] = {}
    for k, stage in enumerate(stages):
        for variable in (*stage.weights, *stage.state):
            if id(variable) not in owners:
                owners[id(variable)] = k
                with tf.device(devices[k]):
                    values[id(variable)] = tf.identity(variable.value)
    for k, stage in enumerate(stages):
        for variable in traced[k].changed(stage.state):
            users = [other.index for other in stages if _holds(other, variable)]
            if len(users) > 1:
                raise ValueError(
                    "Stages can share weights, but not what a step changes, since each "
                    "stage would advance it from the same value. Received "
                    f"'{variable.path}' in stages {users}. Use a layer of its own in "
                    "each, or a `balance` that keeps them together."
                )
    weights = {id(v): None for stage in stages for v in stage.weights}
    return Snapshot(values, owners, tuple(weights))


def _holds(stage: Stage, variable: keras.Variable) -> bool:
    return any(variable is other for other in stage.state)
