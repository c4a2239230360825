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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

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
