"""Weights updated where they are, on every replica as if it were the only one.

By itself Keras runs the arithmetic of every update on the first device and keeps slots
there. Over replicas it clips gradients before they are summed, asks the first replica
alone whether they are finite, and cannot accumulate them or average weights.

Here gradients are summed over replicas first. Then Keras' optimizer is applied, all of
it, once for each replica, and shown that replica's copies alone: it does what it does
on one device, on each. Where replicas share out what is kept, it is applied once, shown
each weight's owner, and the others copy what has come out.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals, tf_internals
from tfgpipe.devices import colocation
from tfgpipe.distribution import all_reduce, processes, replica_context
from tfgpipe.distribution.all_reduce import Gradient
from tfgpipe.distribution.stage_strategy import StageStrategy
from tfgpipe.distribution.strategy import PipelineStrategy


def place_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer keep slots, and update weights, where the weights are.

    Over replicas it then works on the sums of all replicas' gradients: clipping,
    accumulation, moving averages and loss scaling are those of one replica that has all
    rows.

    Under `fit` a pipeline does this to the model's own optimizer. Call it on an
    optimizer of your own, for a custom training loop, before its first step.

    Example:

    >>> optimizer = keras.optimizers.Adam()
    >>> tfgpipe.place_optimizer(optimizer)

    Args:
        optimizer: The optimizer.

    Raises:
        ValueError: If it is of several, or under a strategy that is not for pipelines.
    """
    strategy = replica_context.current_strategy()
    _check_strategy(strategy)
    if strategy is not None and isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ValueError(
            "Under a distribution strategy one optimizer updates all weights. Received "
            f"MultiOptimizer '{optimizer.name}'. Use one of those inside it, or leave "
            "the strategy out."
        )
    places: Any = _WhereTheWeightsAre()
    if isinstance(strategy, tf.distribute.TPUStrategy):
        places = strategy  # On TPUs TensorFlow's own knows where variables are.
    keras_internals.update_by(optimizer, places, _apply)


class _WhereTheWeightsAre:
    """What a Keras optimizer asks of a distribution strategy."""

    @property
    def extended(self) -> _WhereTheWeightsAre:
        return self

    def colocate_vars_with(
        self, variable: tf.Variable
    ) -> contextlib.AbstractContextManager[Any]:
        strategy = replica_context.current_strategy()
        if isinstance(strategy, StageStrategy):
            return strategy.slot_scope(variable)
        return tf.device(variable.device)

    def update(
        self,
        variable: tf.Variable,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        del group  # One variable on one device: nothing to group.
        with tf.device(variable.device):
            return fn(variable, *args, **(kwargs or {}))


def _apply(
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Gradient | None],
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> None:
    """Applies an optimizer, in place of its own `apply`."""
    context = tf.distribute.get_replica_context()
    strategy = replica_context.current_strategy()
    _check_strategy(strategy)
    if context is None or strategy is None or all(g is None for g in grads):
        with colocation.data():
            type(optimizer).apply(optimizer, grads, trainable_variables)
        return
    if trainable_variables is None:
        trainable_variables = keras_internals.weights_of(optimizer)
    weights = list(trainable_variables)
    if isinstance(strategy, tf.distribute.TPUStrategy):
        sums = list(grads)
        for i, (gradient, weight) in enumerate(zip(grads, weights, strict=True)):
            if gradient is not None:
                with strategy.place_of(weight.value):
                    sums[i] = replica_context.sum_over_replicas(gradient)
        type(optimizer).apply(optimizer, sums, weights)
        return
    there = [gradient is not None for gradient in grads]
    present = [gradient for gradient in grads if gradient is not None]
    if processes.are_replicas(strategy):
        known = strategy.instance_keys.of(optimizer, weights)
        given = [x for x in zip(weights, known, there, strict=True) if x[-1]]
        places = [weight.value for weight, _, _ in given]
        present = processes.sum_gradients(present, places, [key for _, key, _ in given])

    def merged(_: tf.distribute.Strategy, *values: Any) -> None:
        given = iter(values)
        update = _Update(optimizer, weights, strategy)
        update.run([next(given) if found else None for found in there])

    context.merge_call(merged, args=tuple(present))


def _check_strategy(strategy: Any) -> None:
    """Raises ValueError for a strategy whose replicas would not be summed over."""
    if strategy is not None and not isinstance(strategy, StageStrategy):
        raise ValueError(
            "An optimizer of a pipeline sums gradients over the replicas of a "
            "`tfgpipe.PipelineStrategy`. Received one under "
            f"{type(strategy).__name__}. Use that strategy, or make another optimizer."
        )


class _Update:
    """One update of the weights by the gradients of all replicas of this process."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: list[keras.Variable],
        strategy: StageStrategy,
    ) -> None:
        if not optimizer.built:
            optimizer.build(weights)
        self._optimizer = optimizer
        self._weights = weights
        self._strategy = strategy
        self._copies = {
            id(v): (v, replica_context.copies_of(v.value))
            for v in (*weights, *optimizer.variables)
        }

    def run(self, values: Sequence[Any]) -> None:
        """Updates all there is.

        Args:
            values: For each weight its gradients, one a replica, or None.
        """
        strategy = self._strategy
        local = tf.distribute.get_strategy().experimental_local_results
        parts = [None if value is None else local(value) for value in values]
        number = next(len(each) for each in parts if each is not None)
        if getattr(strategy, "shard_replicas", "none") == "none":
            self._check_copies(number)
        if isinstance(strategy, PipelineStrategy):
            if strategy.shard_replicas != "none":
                self._on_owners(strategy, parts)
            else:
                self._on_all(self._sums(strategy, values, parts))
        else:  # Sums of all processes.
            self._on_all(parts)

    def _check_copies(self, number: int) -> None:
        """Raises RuntimeError if replicas do not all have copies of a variable."""
        for variable, copies in self._copies.values():
            if len(copies) != number:
                raise RuntimeError(
                    "What is trained on replicas, and its optimizer, must be made "
                    "inside `with strategy.scope():`. Received "
                    f"'{self._optimizer.name}', of which '{variable.path}' is on one "
                    "replica alone."
                )

    def _sums(
        self, strategy: PipelineStrategy, values: Sequence[Any], parts: Sequence[Any]
    ) -> Sequence[Any]:
        """Returns the sum of each gradient on all replicas' devices."""
        if strategy.all_reduce == "nccl":
            present = [value for value in values if value is not None]
            sums = iter(all_reduce.nccl(strategy, present))
            return [None if value is None else next(sums) for value in values]
        return [
            each
            and all_reduce.all_reduce(
                each,
                [copy.device for copy in self._copies[id(weight)][1]],
                how=strategy.all_reduce,
                at=i % len(each),
            )
            for i, (weight, each) in enumerate(zip(self._weights, parts, strict=True))
        ]

    def _on_all(self, sums: Sequence[Any]) -> None:
        """Updates the copies of each replica."""
        (number,) = {len(each) for each in sums if each is not None}
        for d in range(number):
            shown = {key: copies[d] for key, (_, copies) in self._copies.items()}
            self._apply(shown, [each and each[d] for each in sums])

    def _on_owners(self, strategy: PipelineStrategy, parts: Sequence[Any]) -> None:
        """Updates one copy of each variable, and copies it to the other replicas."""
        shown = {key: copies[0] for key, (_, copies) in self._copies.items()}
        grads: list[Gradient | None] = []
        for weight, each in zip(self._weights, parts, strict=True):
            copies = self._copies[id(weight)][1]
            if len(copies) > 1:
                shown[id(weight)] = copies[strategy.owner(weight.value)]
            device = shown[id(weight)].device
            grads.append(None if each is None else all_reduce.reduce_to(each, device))
        self._apply(shown, grads)
        for key, (_, copies) in self._copies.items():
            for copy in copies:
                if copy is not shown[key]:
                    with tf.device(copy.device):
                        copy.assign(shown[key])

    def _apply(
        self, shown: dict[int, tf.Variable], grads: Sequence[Gradient | None]
    ) -> None:
        """Applies the optimizer, showing it one copy of each variable."""
        copies = [(v, shown[key]) for key, (v, _) in self._copies.items()]
        with (
            tf_internals.without_strategy(),
            keras_internals.shown(copies),
            colocation.data(),
        ):
            type(self._optimizer).apply(self._optimizer, grads, self._weights)


# Their update of an entry depends on others of the same weight.
_OF_WHOLE_WEIGHTS = (
    keras.optimizers.Adafactor,
    keras.optimizers.Lamb,
    keras.optimizers.Muon,
)


def warn_of_sharded_updates(
    optimizer: keras.optimizers.Optimizer, num_shards: int
) -> None:
    """Warns of an optimizer to which a part of a weight is a weight of its own."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    of_whole = isinstance(inner, _OF_WHOLE_WEIGHTS)
    if num_shards == 1 or not (of_whole or inner.clipnorm):
        return
    what = type(inner).__name__ if of_whole else f"clipnorm={inner.clipnorm}"
    warnings.warn(
        "The parts of a weight in shards are updated one by one, as if they were "
        f"weights. Received {what}, which takes a norm, a mean or a product of a whole "
        "weight: training differs from that of the layers without shards. Use an "
        "optimizer such as Adam, and `global_clipnorm`.",
        stacklevel=3,
    )
