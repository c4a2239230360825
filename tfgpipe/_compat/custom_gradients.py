"""Custom gradients that a graph keeps, rather than the process.

TensorFlow registers the gradient of each call of `tf.custom_gradient` in a graph by a
name, for good. The gradient reads tensors of the graph, so every graph with such a call
stays in memory until the process ends, and so does the model that it was traced for.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops, registry

_KEPT = "_tfgpipe_gradients"


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with its own gradient, as `tf.custom_gradient` does.

    Args:
        function: Function of tensors that returns results, and their gradient.
    """
    differentiable = tf.custom_gradient(function)

    @functools.wraps(function)
    @tf.autograph.experimental.do_not_convert
    def call(*args: Any) -> Any:
        results = differentiable(*args)
        if not tf.executing_eagerly():
            name = tf.nest.flatten(results)[0].op.get_attr("_gradient_op_type")
            _keep(name.decode(), ops.get_default_graph())
        return results

    return call


def _keep(name: str, graph: tf.Graph) -> None:
    """Moves a gradient from the registry to its graph."""
    registered = ops.gradient_registry._registry
    kept = getattr(graph, _KEPT, {})
    kept[name] = ops.gradient_registry.lookup(name)
    setattr(graph, _KEPT, kept)
    owner = weakref.ref(graph)

    def gradient(op: tf.Operation, *upstream: tf.Tensor) -> Any:
        return getattr(owner(), _KEPT)[name](op, *upstream)

    registered[name] = {**registered[name], registry._TYPE_TAG: gradient}
    # Without another reference than this one, it goes with the graph.
    weakref.finalize(graph, registered.pop, name, None).atexit = False
