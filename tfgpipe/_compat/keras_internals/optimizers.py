"""Optimizers: the weights that they are built for, their slots, their update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfgpipe._util import IdentityMap


def patch_apply(
    optimizer: keras.optimizers.Optimizer, strategy: Any, apply: Callable[..., None]
) -> None:
    """Makes an optimizer use `strategy` for devices, and `apply` in place of its own.

    Keras takes the distribution strategy that an optimizer was made under, and sums
    gradients over replicas amid `apply`, after it has clipped them. `apply` is to sum
    them before. An optimizer that has this `apply` already stays as it is.

    Args:
        optimizer: The optimizer.
        strategy: Has what an optimizer calls of a strategy: `colocate_vars_with`, the
            scope to create slots in, and `update`, which runs an update's arithmetic,
            both in `extended`; and `update_all`, which does so for several variables.
        apply: Called with the optimizer and the arguments of its own `apply`.
    """
    patched = vars(optimizer).get("apply")
    if isinstance(patched, functools.partial) and patched.func is apply:
        return
    optimizer.apply = functools.partial(apply, optimizer)
    # A LossScaleOptimizer leaves the update to the optimizer inside it.
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            each._distribution_strategy = strategy
            each._distributed_tf_update_step = functools.partial(
                _update_step, each, strategy
            )
            each._all_reduce_sum_gradients = list


def _update_step(
    optimizer: Any, strategy: Any, _: Any, grads_and_vars: Any, learning_rate: Any
) -> None:
    """Updates variables, in place of an optimizer's own loop over them."""
    strategy.update_all(
        lambda variable, gradient: optimizer.update_step(
            gradient, variable, learning_rate
        ),
        [(variable, gradient) for gradient, variable in grads_and_vars],
    )


def optimizer_weights(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the weights that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def variable_index(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Returns the index of a weight among those that an optimizer was built for."""
    return optimizer._get_variable_index(variable)


def update_strategy(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the strategy by which an optimizer updates variables."""
    return optimizer._distribution_strategy


def optimizer_scalars(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that each update reads: step and learning rate."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    scalars = (inner._iterations, inner._learning_rate)
    return [v for v in scalars if isinstance(v, keras.Variable)]


def optimizer_slots(
    optimizer: keras.optimizers.Optimizer,
) -> IdentityMap[keras.Variable, list[keras.Variable]]:
    """Returns the slots of each weight that a built optimizer has any for.

    Keras' optimizers have lists of slots with one entry for each weight, in the order
    of the weights: `_momentums[i]` is of the weight `i`, or None if that has none.
    """
    found: IdentityMap[keras.Variable, list[keras.Variable]] = IdentityMap()
    inside = [getattr(optimizer, "inner_optimizer", None)]  # Of a LossScaleOptimizer.
    inside += getattr(optimizer, "_inner_optimizers", [])  # Of a MultiOptimizer.
    for each in filter(None, (optimizer, *inside)):
        weights = each._trainable_variables
        for name, slots in vars(each).items():
            if name in ("_variables", "_trainable_variables"):
                continue
            if isinstance(slots, list) and len(slots) == len(weights):
                for weight, slot in zip(weights, slots, strict=True):
                    if isinstance(slot, keras.Variable):
                        found.setdefault(weight, []).append(slot)
    return found
