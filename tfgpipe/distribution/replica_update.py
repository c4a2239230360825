"""One update of the weights by the gradients of all replicas of this process.

Gradients are summed over replicas first. Then Keras' optimizer is applied, all of it,
once for each replica, and sees that replica's copies alone: it does what it does on one
device, on each. Under ZeRO it is applied once, on the owner's copy of each weight, and
the other replicas copy the result; of a weight in slices, on each slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals, sliced_variables, tf_internals
from tfgpipe._util import IdentityMap
from tfgpipe.devices import colocation
from tfgpipe.distribution import all_reduce, slices
from tfgpipe.distribution.all_reduce import Gradient

# For each weight its gradients, one a replica, or None.
PerReplica = Sequence[Any]


def merge_call(
    gradients: Sequence[Gradient | None], run: Callable[[Sequence[Any]], None]
) -> None:
    """Runs a function once on the gradients of all replicas being built.

    Args:
        gradients: Gradients of the replica being built, None for weights without one.
        run: Takes for each weight the distributed value of its gradients, or None.
    """

    def merged(_: tf.distribute.Strategy, *values: Any) -> None:
        remaining = iter(values)
        run([None if x is None else next(remaining) for x in gradients])

    present = tuple(gradient for gradient in gradients if gradient is not None)
    tf.distribute.get_replica_context().merge_call(merged, args=present)


class ReplicaUpdate:
    """An update of weights that have a copy on each replica.

    Args:
        optimizer: The optimizer, which is built if need be.
        weights: The weights.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, weights: list[keras.Variable]
    ) -> None:
        if not optimizer.built:
            optimizer.build(weights)
        self._optimizer = optimizer
        self._weights = weights
        local_results = tf.distribute.get_strategy().experimental_local_results
        self._copies = IdentityMap(
            (variable, local_results(variable.value))
            for variable in (*weights, *optimizer.variables)
        )

    def devices(self, weight: keras.Variable) -> list[str]:
        """Returns the devices of a weight's copies."""
        return [copy.device for copy in self._copies[weight]]

    def check_copies(self, num_replicas: int) -> None:
        """Raises RuntimeError if replicas do not all have copies of a variable."""
        for variable, copies in self._copies.items():
            if len(copies) != num_replicas:
                raise RuntimeError(
                    "What is trained on replicas, and its optimizer, must be made "
                    "inside `with strategy.scope():`. Received "
                    f"'{self._optimizer.name}', of which '{variable.path}' is on one "
                    "replica alone."
                )

    def on_replicas(self, sums: PerReplica) -> None:
        """Updates the copies of each replica."""
        (num_replicas,) = {len(each) for each in sums if each is not None}
        for d in range(num_replicas):
            copies = IdentityMap((v, x[d]) for v, x in self._copies.items())
            grads = [each and each[d] for each in sums]
            self._apply(copies, grads, self._weights)

    def on_owners(
        self, gradients: PerReplica, owner: Callable[[tf.Variable], int]
    ) -> None:
        """Updates one copy of each variable, and copies it to the other replicas.

        Args:
            gradients: For each weight its gradients, one a replica, or None.
            owner: Returns which of the copies of a weight to update.
        """
        updated = IdentityMap((v, copies[0]) for v, copies in self._copies.items())
        grads: list[Gradient | None] = []
        weights: list[keras.Variable] = []
        owners: list[int] = []  # Of those gradients that are clipped.
        for i, (weight, each) in enumerate(zip(self._weights, gradients, strict=True)):
            copies = self._copies[weight]
            if len(copies) > 1:
                updated[weight] = copies[owner(weight.value)]
            parts = keras_internals.variables.slices_of(weight)
            weights += parts
            if each is None:
                grads += [None] * len(parts)
                continue
            if isinstance(copies[0], sliced_variables.SlicedVariable):
                grads += slices.reduce_scatter(each, copies[0])
            else:
                grads.append(all_reduce.reduce_to(each, updated[weight].device))
            if not weight.overwrite_with_gradient:
                owners += [i] * len(parts)
        with keras_internals.optimizers.by_slices(self._optimizer, owners):
            self._apply(updated, grads, weights)
        for variable, copies in self._copies.items():
            for copy in copies:
                if copy is not updated[variable]:
                    with tf.device(copy.device):
                        copy.assign(updated[variable])

    def _apply(
        self,
        copies: IdentityMap[keras.Variable, tf.Variable],
        grads: Sequence[Gradient | None],
        weights: Sequence[keras.Variable],
    ) -> None:
        """Applies the optimizer, which sees one copy of each variable."""
        with (
            tf_internals.without_strategy(),
            keras_internals.substitution.swap_values(list(copies.items())),
            colocation.colocate_with_inputs(),
        ):
            type(self._optimizer).apply(self._optimizer, grads, weights)
