"""One step of compiled models: what reaches the optimizer, and what it leaves behind.

`compare` differentiates a call of a model; here `fit` and `train_on_batch` do all the
work, as they have to with a model that owns its loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tests.helpers import compare


class Keeps(keras.optimizers.Optimizer):
    """Keeps the gradients it is given, and leaves weights as they are."""

    def __init__(self, learning_rate: float = 1.0, **arguments: Any) -> None:
        super().__init__(learning_rate, **arguments)

    def build(self, variables: list[keras.Variable]) -> None:
        if not self.built:
            super().build(variables)
            nothing = keras.initializers.Constant(math.nan)
            self.kept = self.add_optimizer_variables(variables, "kept", nothing)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        # A gradient of an embedding comes as rows.
        whole = tf.convert_to_tensor(gradient)
        self.assign(self.kept[self._get_variable_index(variable)], whole)


@dataclasses.dataclass
class Step:
    """All that one step leaves behind.

    Attributes:
        logs: The loss and the metrics, as Keras reports them.
        gradients: What reached the optimizer for each weight, or None.
        state: The value of each other variable of the model.
        metrics: The value of each variable of the metrics.
    """

    logs: dict[str, Any]
    gradients: dict[str, np.ndarray | None]
    state: dict[str, np.ndarray]
    metrics: list[np.ndarray]


def train(
    model: keras.Model, *data: Any, unknown: bool = False, eagerly: bool = True
) -> Step:
    """Trains a model, compiled with `Keeps`, on one mini-batch.

    Args:
        model: The model.
        *data: Inputs, targets and, optionally, sample weights, nested arrays.
        unknown: Whether the number of rows is unknown until the step runs.
        eagerly: Whether a plain model runs eagerly, which takes less time than tracing.
    """
    if eagerly and not isinstance(model, tfgpipe.PipelinedModel):
        model.run_eagerly = True
    if unknown:
        logs = {
            k: v[0]
            for k, v in model.fit(
                unsized(data), shuffle=False, verbose=0
            ).history.items()
        }
    else:
        logs = model.train_on_batch(*data, return_dict=True)
    optimizer = model.optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    kept = [gradient.numpy() for gradient in optimizer.kept]
    return Step(
        logs=logs,
        gradients={
            f"{i}: {v.path}": None if np.isnan(g).all() else g
            for i, (v, g) in enumerate(
                zip(model.trainable_variables, kept, strict=True)
            )
        },
        state={
            f"{i}: {v.path}": v.numpy()
            for i, v in enumerate(model.non_trainable_variables)
        },
        metrics=[v.numpy() for v in model.metrics_variables],
    )


def unsized(data: tuple) -> tf.data.Dataset:
    """Returns a dataset of one mini-batch whose number of rows is not known."""
    num_rows = len(keras.tree.flatten(data)[0])
    return tf.data.Dataset.from_tensor_slices(data).batch(num_rows)


def assert_same(expected: Step, received: Step, *, rtol: float, atol: float) -> None:
    """Asserts that two steps agree in every single value."""
    for (name, a), (_, b) in zip(_named(expected), _named(received), strict=True):
        if a is None or b is None:
            assert a is b is None, f"{name}: expected {a}, received {b}"
            continue
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, name
        compare.close(a, b, name, rtol, atol)


def _named(step: Step) -> Iterator[tuple[str, Any]]:
    for what in ("logs", "gradients", "state"):
        values = getattr(step, what)
        yield f"number of {what}", len(values)
        for name, value in values.items():
            yield f"{what} of {name}", value
    for number, value in enumerate(step.metrics):
        yield f"variable {number} of the metrics", value
