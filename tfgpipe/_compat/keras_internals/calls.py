"""Calls of layers: masks of tensors, scopes, the model whose call is under way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope


def get_mask(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the Keras mask of a tensor."""
    return backend.get_keras_mask(tensor)


def set_mask(tensor: tf.Tensor, mask: tf.Tensor | None) -> None:
    """Sets the Keras mask of a tensor, which is lost at a function's boundary."""
    backend.set_keras_mask(tensor, mask)


def is_symbolic_call() -> bool:
    """Returns whether Keras calls a layer only to infer output shapes."""
    return in_symbolic_scope()


def current_stateless_scope() -> keras.StatelessScope | None:
    """Returns the innermost open `StatelessScope`, or None."""
    return backend.get_stateless_scope()


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Leaves the scope in which reading a variable casts it to the compute dtype.

    Keras enters that scope around a layer's `call`, and offers no public way out.
    """
    outer = global_state.get_global_attribute("autocast_scope")
    global_state.set_global_attribute("autocast_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("autocast_scope", outer)


def calling_optimizer() -> keras.optimizers.Optimizer | None:
    """Returns the optimizer compiled into the model whose call is under way, if any.

    A layer has no public path to the model around it. Keras keeps the outermost layer
    of each call, so that inner ones inherit `training`; that is the path.
    """
    context = global_state.get_global_attribute("current_call_ctx")
    model = getattr(context, "entry_layer", None)
    return getattr(model, "optimizer", None)
