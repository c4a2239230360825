"""Optimizers: the weights that they are built for, their slots, their update."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat.keras_internals.variables import slices_of
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


class GroupedDecay:
    """Comes before an optimizer class: weights decay by learning rates of their own."""

    def learning_rate_factor(self, weight: keras.Variable) -> float:
        """Returns the factor of the learning rate of a weight."""
        raise NotImplementedError

    def _apply_weight_decay(self, variables: Sequence[keras.Variable]) -> None:
        own: Any = self
        groups: dict[float, list[keras.Variable]] = {}
        for each in variables:
            groups.setdefault(self.learning_rate_factor(each), []).append(each)
        for factor, group in groups.items():
            changed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if factor != 1.0:
                scaled = own.learning_rate * factor
                changed = _attribute(self, "_get_current_learning_rate", lambda: scaled)  # noqa: B023
            with changed:
                super()._apply_weight_decay(group)  # type: ignore[misc]


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
    for each in _with_inner(optimizer):
        for name in _slot_lists(each):
            slots = getattr(each, name)
            for weight, slot in zip(each._trainable_variables, slots, strict=True):
                if slot is not None:
                    found.setdefault(weight, []).append(slot)
    return found


def _with_inner(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Returns an optimizer and those inside it."""
    inside = [getattr(optimizer, "inner_optimizer", None)]  # Of a LossScaleOptimizer.
    inside += getattr(optimizer, "_inner_optimizers", [])  # Of a MultiOptimizer.
    return [optimizer, *filter(None, inside)]


def _slot_lists(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Returns the names of an optimizer's lists with a slot for each weight."""
    num_weights = len(optimizer._trainable_variables)
    return [
        name
        for name, value in vars(optimizer).items()
        if name not in ("_variables", "_trainable_variables")
        and isinstance(value, list)
        and len(value) == num_weights
        and all(x is None or isinstance(x, keras.Variable) for x in value)
    ]


@contextlib.contextmanager
def by_slices(
    optimizer: keras.optimizers.Optimizer, owners: Sequence[int]
) -> Iterator[None]:
    """Inside, an optimizer has the slices of its weights and slots in their place.

    Args:
        optimizer: The optimizer.
        owners: For each gradient that `apply` clips, the index of its weight.
    """
    with contextlib.ExitStack() as restored:
        for each in _with_inner(optimizer):
            for name, value in _in_slices(each, owners).items():
                restored.enter_context(_attribute(each, name, value))
        yield


def _in_slices(
    optimizer: keras.optimizers.Optimizer, owners: Sequence[int]
) -> dict[str, Any]:
    """Returns the attributes of an optimizer that are others by slices."""
    weights = list(optimizer._trainable_variables)
    slices = [slices_of(weight) for weight in weights]
    all_slices = [part for parts in slices for part in parts]
    inside: dict[str, Any] = {"_trainable_variables": all_slices}
    for name in _slot_lists(optimizer):
        inside[name] = []
        for parts, slot in zip(slices, getattr(optimizer, name), strict=True):
            of_slot = [slot] if slot is None else slices_of(slot)
            same = len(of_slot) == len(parts)
            inside[name] += of_slot if same else of_slot * len(parts)
    inside["_trainable_variables_indices"] = {
        optimizer._var_key(part): i for i, part in enumerate(all_slices)
    }
    excluded = set(getattr(optimizer, "_exclude_from_weight_decay", ()))
    for weight, parts in zip(weights, slices, strict=True):
        if optimizer._var_key(weight) in excluded:
            excluded.update(map(optimizer._var_key, parts))
    inside["_exclude_from_weight_decay"] = excluded
    if optimizer.clipnorm:
        inside["_clip_gradients"] = functools.partial(_clip, optimizer, owners)
    return inside


def _clip(
    optimizer: keras.optimizers.Optimizer,
    owners: Sequence[int],
    gradients: Sequence[tf.Tensor | tf.IndexedSlices],
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Clips gradients in slices, each by the norm of all slices of its weight."""
    squares: dict[int, list[tf.Tensor]] = {}
    for owner, gradient in zip(owners, gradients, strict=True):
        values = getattr(gradient, "values", gradient)
        squares.setdefault(owner, []).append(tf.reduce_sum(tf.square(values)))
    norms = {i: tf.sqrt(tf.add_n(some)) for i, some in squares.items()}
    limit = optimizer.clipnorm
    return [
        optimizer._clip_by_norm(gradient)
        if len(squares[owner]) == 1
        else gradient * (limit / tf.maximum(norms[owner], limit))
        for owner, gradient in zip(owners, gradients, strict=True)
    ]


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute is another, which Keras does not track."""
    before = dict(vars(owner))
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if name in before:
            object.__setattr__(owner, name, before[name])
        else:
            object.__delattr__(owner, name)
