"""Running a layer with other values in place of its weights, or other activations.

Keras has no hook at the weights of a layer that is called. But inside a
`keras.StatelessScope` reading a variable yields what the scope maps it to, wherever in
the layer it is read; so one mechanism serves every layer there is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals

Pairs = Sequence[tuple[keras.Variable, tf.Tensor]]


@contextlib.contextmanager
def weights(owner: keras.layers.Layer, pairs: Pairs) -> Iterator[None]:
    """Has variables read as other values, for a while.

    What layers assign meanwhile is assigned as ever, and losses they add are added.

    Args:
        owner: The layer that takes on losses.
        pairs: Variables, and what they read as.
    """
    outer = keras_internals.current_stateless_scope()
    if outer is not None:
        # A scope inside another does not see what that one holds.
        held = outer.state_mapping
        before = {id(v): held[id(v)] for v, _ in pairs if id(v) in held}
        for pair in pairs:
            outer.add_update(pair)
        try:
            yield
        finally:
            for variable, _ in pairs:
                key = id(variable)
                held.pop(key)
                if key in before:
                    held[key] = before[key]
        return
    substituted = {id(variable) for variable, _ in pairs}
    with keras.StatelessScope(list(pairs), collect_losses=True) as scope:
        yield
    for variable in owner.variables:
        value = scope.get_current_value(variable)
        if value is not None and id(variable) not in substituted:
            variable.assign(value)
    for loss in scope.losses:
        owner.add_loss(loss)


@contextlib.contextmanager
def activations(
    layer: keras.layers.Layer, functions: Mapping[str, Callable[..., Any]]
) -> Iterator[None]:
    """Has attributes of a layer, or of layers in it, be other functions, for a while.

    Args:
        layer: The layer.
        functions: By path of attributes, such as `activation` or `cell.activation`.
    """
    before = []
    try:
        for path, function in functions.items():
            owner, name = _owner(layer, path)
            before.append((owner, name, getattr(owner, name)))
            # Past Keras, which keeps track of what is set in the usual way.
            object.__setattr__(owner, name, function)
        yield
    finally:
        for owner, name, function in reversed(before):
            object.__setattr__(owner, name, function)


def attribute(layer: Any, path: str) -> Any:
    """Returns the attribute at the end of a path."""
    owner, name = _owner(layer, path)
    return getattr(owner, name)


def _owner(layer: Any, path: str) -> tuple[Any, str]:
    """Returns the object that has the attribute at the end of a path, and its name."""
    *others, name = path.split(".")
    for other in others:
        layer = getattr(layer, other)
    return layer, name
