"""Optimizers that keep slots, and update weights, where the weights are.

Keras runs the arithmetic of every update on the first device, and creates slots
there. Over replicas it clips gradients before they are summed, asks the first replica
alone whether they are finite, and cannot accumulate them or average weights. Here each
strategy for pipelines applies the optimizer: see `StageStrategy.apply_gradients`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import functions, keras_internals
from tfgpipe.devices import device_type
from tfgpipe.distribution.all_reduce import Gradient
from tfgpipe.distribution.single_replica import SingleReplica, current_strategy
from tfgpipe.distribution.stage_strategy import slot_device


def place_optimizer(
    optimizer: keras.optimizers.Optimizer, *, on_host: bool = False
) -> None:
    """Makes an optimizer keep slots, and update weights, where the weights are.

    Over replicas it then works on the sums of all replicas' gradients: clipping,
    accumulation, moving averages and loss scaling are those of one replica that has all
    rows.

    Under `fit` a pipeline does this to the model's own optimizer. Call it on an
    optimizer of your own, for a custom training loop, before its first step. It changes
    the optimizer in place.

    Example:

    >>> optimizer = keras.optimizers.Adam()
    >>> tfgpipe.place_optimizer(optimizer)

    Args:
        optimizer: The optimizer.
        on_host: True to keep slots, and compute updates, on the host of each weight's
            device, for one replica.

    Raises:
        ValueError: If it is of several, or under a strategy that is not for pipelines;
            or if slots are to be on the host under a strategy.
    """
    current_strategy().check_optimizer(optimizer)
    current_strategy().check_offload(on_host=on_host)
    keras_internals.optimizers.patch_apply(
        optimizer, _ColocatedStrategy(optimizer, on_host=on_host), _apply
    )


class _ColocatedStrategy:
    """The strategy of a Keras optimizer that colocates with the weights.

    What the update of every weight reads is read once on each device.

    Args:
        optimizer: The optimizer.
        on_host: True to colocate with the hosts of their devices.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, *, on_host: bool = False
    ) -> None:
        self._optimizer, self._on_host = optimizer, on_host
        # What the updates of one step have read, by graph and device.
        self._read: dict[Hashable, list[tuple[keras.Variable, tf.Tensor]]] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The updates of one step are inside. The next one reads anew."""
        self._read.clear()
        try:
            yield
        finally:
            self._read.clear()

    @property
    def extended(self) -> _ColocatedStrategy:
        return self

    def colocate_vars_with(
        self, variable: tf.Variable
    ) -> contextlib.AbstractContextManager[Any]:
        if self._on_host:
            return tf.device(self._device(variable))
        return current_strategy().slot_scope(variable)

    def _device(self, variable: tf.Variable) -> str:
        return slot_device(variable, on_host=self._on_host)

    def update(
        self,
        variable: tf.Variable,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        del group  # One variable on one device: nothing to group.
        return self._run_on(
            self._device(variable), lambda: fn(variable, *args, **(kwargs or {}))
        )

    def update_all(
        self,
        update: Callable[[tf.Variable, Gradient], Any],
        pairs: Sequence[tuple[tf.Variable, Gradient]],
    ) -> None:
        """Updates variables, those of a TPU in one function that XLA compiles."""
        together: dict[Hashable, list[tuple[tf.Variable, Gradient]]] = {}
        for i, pair in enumerate(pairs):
            device = self._device(pair[0])
            key = device if device_type(device) == "TPU" else i
            together.setdefault(key, []).append(pair)

        def run(some: Sequence[tuple[tf.Variable, Gradient]]) -> None:
            for variable, gradient in some:
                update(variable, gradient)

        for some in together.values():
            self._run_on(self._device(some[0][0]), functools.partial(run, some))

    def _run_on(self, device: str, run: Callable[[], Any]) -> Any:
        """Runs an update of variables of a device there."""
        with tf.device(device):
            if device_type(device) == "TPU":
                run = functions.compiled(run)
            elif tf.executing_eagerly():
                return run()
            # The update may be in the branch of a conditional.
            place = tf.compat.v1.get_default_graph(), device
            if place not in self._read:
                self._read[place] = [
                    (scalar, tf.identity(scalar.value))
                    for scalar in keras_internals.optimizers.optimizer_scalars(
                        self._optimizer
                    )
                ]
            with keras_internals.substitution.swap_values(self._read[place]):
                return run()


def _apply(
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Gradient | None],
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> None:
    """Applies an optimizer, in place of its own `apply`."""
    with keras_internals.optimizers.update_strategy(optimizer).step():
        _apply_once(optimizer, grads, trainable_variables)


def _apply_once(
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Gradient | None],
    trainable_variables: Sequence[keras.Variable] | None,
) -> None:
    strategy = current_strategy()
    strategy.check_optimizer(optimizer)
    if tf.distribute.in_cross_replica_context() or all(g is None for g in grads):
        strategy = SingleReplica()
    strategy.apply_gradients(optimizer, trainable_variables, list(grads))


# Optimizers whose update of an entry depends on other entries of the same weight.
_WHOLE_WEIGHT_OPTIMIZERS = (
    keras.optimizers.Adafactor,
    keras.optimizers.Lamb,
    keras.optimizers.Muon,
)


def warn_of_sharded_updates(
    optimizer: keras.optimizers.Optimizer, num_shards: int
) -> None:
    """Warns of an optimizer that treats each shard of a weight as a weight."""
    what = _looks_at_whole_weights(optimizer)
    if num_shards == 1 or what is None:
        return
    warnings.warn(
        "The parts of a weight in shards are updated one by one, as if they were "
        f"weights. Received {what}, which takes a norm, a mean or a product of a whole "
        "weight: training differs from that of the layers without shards. Use an "
        "optimizer such as Adam, and `global_clipnorm`.",
        stacklevel=3,
    )


def warn_of_stacked_updates(optimizer: keras.optimizers.Optimizer) -> None:
    """Warns of an optimizer that treats the weights of all stages as one weight."""
    what = _looks_at_whole_weights(optimizer)
    if what is None:
        return
    warnings.warn(
        "In an SPMD pipeline the weights of all stages are updated as one. Received "
        f"{what}, which takes a norm, a mean or a product of a whole weight: training "
        "differs from that of the layers without a pipeline. Use an optimizer such as "
        "Adam, and `global_clipnorm`.",
        stacklevel=3,
    )


def _looks_at_whole_weights(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Names the part of an optimizer that depends on whole weights, if one does."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, _WHOLE_WEIGHT_OPTIMIZERS):
        return type(inner).__name__
    return f"clipnorm={inner.clipnorm}" if inner.clipnorm else None
