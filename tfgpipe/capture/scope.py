"""Accumulators: values of a mini-batch, merged microbatch by microbatch.

A moving average that is updated once per step cannot be assigned by each microbatch.
Instead the layer returns values of its microbatch, such as a sum and a count; they are
merged with those of earlier microbatches, and after the last one the variables are
updated from those of the mini-batch:

    microbatch   0        1        2        the step
                 │        │        │
    nothing ──▶ merge ─▶ merge ─▶ merge ─▶ update ──▶ variables

The merged values are part of the carry, from one forward to the next, so recomputation,
empty microbatches and compilation need nothing new.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._util import unique
from tfgpipe.distribution import ReplicaGroup


class Accumulator(abc.ABC):
    """The values of one call of a layer for its microbatch.

    Attributes:
        values: Tensors of static shapes. All zero means no observation.
        variables: The `keras.Variable`s that are updated from it.
    """

    values: Sequence[Any]
    variables: Sequence[Any]

    @abc.abstractmethod
    def merge(self, previous: Sequence[Any]) -> list[Any]:
        """Returns values for this microbatch and all earlier ones together."""

    @abc.abstractmethod
    def update(
        self, merged: Sequence[Any], variable_values: Sequence[Any]
    ) -> list[Any]:
        """Returns new values of the variables.

        Args:
            merged: The merged values of the mini-batch.
            variable_values: The values of the variables so far.
        """


class TracingScope(keras.StatelessScope):
    """The scope in which layers are traced.

    Args:
        values: For each variable, its value at the start.
        replicas: The replicas that compute the same on other rows, or None.

    Attributes:
        replicas: The same.
        accumulators: What layers accumulate over microbatches, in the order of their
            calls.
        captured_variables: Variables that were read and have no value here.
    """

    def __init__(
        self,
        values: Iterable[tuple[keras.Variable, tf.Tensor]],
        replicas: ReplicaGroup | None,
    ) -> None:
        super().__init__(values, collect_losses=True)
        self.replicas = replicas
        self.accumulators: list[Accumulator] = []
        self.captured_variables: list[keras.Variable] = []

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value of a variable here; None if it has none."""
        value = super().get_current_value(variable)
        if value is None:
            self.captured_variables.append(variable)
        return value


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is of a type that has gradients."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def sum_losses(losses: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Returns the sum of losses, in at least single precision, or None of none."""
    if not losses:
        return None
    dtype = tf.float64 if tf.float64 in [loss.dtype for loss in losses] else tf.float32
    return tf.add_n([tf.cast(tf.reduce_sum(loss), dtype) for loss in losses])


def check_assignments(
    scope: keras.StatelessScope, known: Sequence[keras.Variable]
) -> None:
    """Raises ValueError if a variable that is not known has been assigned."""
    if len(scope.state_mapping) > len(unique(known)):
        raise ValueError(
            "A layer inside the pipeline assigns a variable that no layer owns, so "
            "the pipeline cannot carry its value from microbatch to microbatch. "
            "Expected every assigned variable in some layer's `variables`; received "
            "one that is not, most often the seed of `keras.random` functions called "
            "without `seed=`. Give the layer its own "
            "`self.seed = keras.random.SeedGenerator(...)` and pass `seed=self.seed`."
        )
