"""Attributes of Keras' objects that are others while a step is traced.

Keras has no hook at calls of layers inside other layers, at reads of variables, or at
single losses. Where one is needed, an attribute of a user's object is replaced and put
back. One lock is held meanwhile, so that another thread that traces the same object
waits until it is as Keras left it. Nobody waits for another thread while it holds the
lock; replicas wait for one another outside.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat.keras_internals.calls import current_stateless_scope
from tfgpipe._util import IdentityMap

_lock = threading.RLock()


@contextlib.contextmanager
def substitute(*attributes: tuple[Any, str, Callable[[Any], Any]]) -> Iterator[None]:
    """Inside, attributes of objects have other values.

    Args:
        *attributes: Objects, each with the name of its attribute and a function from
            the value before to the one inside.
    """
    with _lock, contextlib.ExitStack() as restored:
        for owner, name, function in attributes:
            before = getattr(owner, name)
            restored.callback(setattr, owner, name, before)
            setattr(owner, name, function(before))
        yield


def as_subclasses(
    layers: Iterable[Any], class_of: Callable[[Any], type]
) -> contextlib.AbstractContextManager[None]:
    """Inside, each layer is an instance of another class.

    Python lets an object take a subclass of its class; its variables, and all else,
    stay.

    Args:
        layers: The layers.
        class_of: Returns the subclass for a layer, or its class to leave it. No other
            thread has the layer as a subclass meanwhile.
    """
    return substitute(*((x, "__class__", lambda _, x=x: class_of(x)) for x in layers))


def swap_values(
    values: Iterable[tuple[keras.Variable, tf.Variable | tf.Tensor]],
) -> contextlib.AbstractContextManager[None]:
    """Inside, each Keras variable is one replica's copy of it, or a value to read."""
    return substitute(
        *((variable, "_value", lambda _, x=x: x) for variable, x in values)
    )


@contextlib.contextmanager
def read_as(
    layer: keras.layers.Layer, values: Sequence[tuple[keras.Variable, tf.Tensor]]
) -> Iterator[None]:
    """Inside, variables read as other values in this thread, wherever they are read.

    Inside a `keras.StatelessScope` a variable reads as the value that the scope maps it
    to. Assignments and losses of layers inside take effect as usual.

    Args:
        layer: The layer that losses are added to.
        values: Variables, each with its value inside.
    """
    outer = current_stateless_scope()
    if outer is not None:
        # A scope inside another does not see what that one holds.
        mapping = outer.state_mapping
        before = {id(v): mapping[id(v)] for v, _ in values if id(v) in mapping}
        for pair in values:  # Of the base class: it is no assignment.
            keras.StatelessScope.add_update(outer, pair)
        try:
            yield
        finally:
            for variable, _ in values:
                del mapping[id(variable)]
            mapping.update(before)
        return
    substituted = IdentityMap(values)
    with keras.StatelessScope(list(values), collect_losses=True) as scope:
        yield
    for variable in layer.variables:
        value = scope.get_current_value(variable)
        if value is not None and variable not in substituted:
            variable.assign(value)
    for loss in scope.losses:
        layer.add_loss(loss)


class SharedSubstitution(contextlib.AbstractContextManager[None]):
    """An attribute that is another while any thread is inside.

    Threads do not wait for one another, as replicas that sum inside would forever: the
    value has to tell them apart. Keras does not track it.

    Args:
        owner: Object with the attribute.
        name: Name of the attribute.
        value: Value inside.
    """

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name = owner, name
        self._outside, self._inside = getattr(owner, name), value
        self._num_inside = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            object.__setattr__(self._owner, self._name, self._inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                object.__setattr__(self._owner, self._name, self._outside)
