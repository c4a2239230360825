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

from tfgpipe._util import IdentityMap
from tfgpipe.distribution import ReplicaGroup


class Accumulator(abc.ABC):
    """The values of one call of a layer for its microbatch.

    Attributes:
        values: Tensors of static shapes. All zero means no observation.
        variables: The `keras.Variable`s that are updated from it.
        over_replicas: True if the values are of the microbatch of all replicas.
    """

    values: Sequence[Any]
    variables: Sequence[Any]
    over_replicas: bool = False

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

    As in plain Keras no gradient passes from a variable to what it was assigned: what
    reads it, before or after, has the gradient of the variable.

    Args:
        values: For each variable, its value at the start.
        replicas: The replicas that compute the same on other examples, or None.

    Attributes:
        accumulators: Accumulators of layers, in the order of their calls.
        assigned_variables: Variables that layers have assigned, in this order.
        captured_variables: Variables that were read and have no value here.
        over_replicas: Variables with a value that is the same on all replicas, computed
            from the microbatch of all of them.
        loss_calls: For each of the losses, the index of the call that added it.
    """

    def __init__(
        self,
        values: Iterable[tuple[keras.Variable, tf.Tensor]],
        replicas: ReplicaGroup | None,
    ) -> None:
        super().__init__(values, collect_losses=True)
        self.replicas = replicas
        self.accumulators: list[Accumulator] = []
        self.assigned_variables: list[keras.Variable] = []
        self.captured_variables: list[keras.Variable] = []
        self.over_replicas: list[keras.Variable] = []
        self.loss_calls: list[int] = []

    def substitute(
        self, pairs: Iterable[tuple[keras.Variable, tf.Tensor | None]]
    ) -> None:
        """Has variables read as other values, through which gradients flow."""
        for pair in pairs:
            super().add_update(pair)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Gives a variable a new value, as a layer that assigns it does."""
        variable, value = update
        self.assigned_variables.append(variable)
        current = super().get_current_value(variable)
        if current is not None and is_differentiable(value):
            update = variable, tf.grad_pass_through(lambda _: value)(current)
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value of a variable here; None if it has none."""
        value = super().get_current_value(variable)
        if value is None:
            self.captured_variables.append(variable)
        return value

    def check_assignments(self, carried: Sequence[keras.Variable]) -> None:
        """Raises ValueError if a variable has been assigned that is not carried."""
        known = IdentityMap((variable, None) for variable in carried)
        for variable in self.assigned_variables:
            if variable not in known:
                raise ValueError(
                    "A layer inside the pipeline assigns a variable that the pipeline "
                    "does not carry from microbatch to microbatch. Expected one among "
                    "the `variables` of a layer, or of a metric of a layer; received "
                    f"'{variable.path}'. If it is the seed of `keras.random` functions "
                    "called without `seed=`, give the layer its own "
                    "`self.seed = keras.random.SeedGenerator(...)` and pass "
                    "`seed=self.seed`; else make it by `self.add_weight`."
                )


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is of a type that has gradients."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def stack_losses(losses: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Returns the sum of each of n losses, `[n]`, or None of none.

    In at least single precision. Of a loss with axes Keras takes the sum.
    """
    if not losses:
        return None
    dtype = tf.float64 if tf.float64 in [loss.dtype for loss in losses] else tf.float32
    return tf.stack([tf.cast(tf.reduce_sum(loss), dtype) for loss in losses])
