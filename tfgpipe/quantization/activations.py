"""Activation functions with their argument, or their result, fake-quantized.

Which of the two is decided by how TFLite runs them: fused with the layer's product,
whose result is then never stored, or as operations of their own, which take integers.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.quantization.fake_quant import FakeQuantNode, QuantContext

# As tensorflow-model-optimization has them; any other is like those it fuses.
_QUANTIZED_ARGUMENT = frozenset({"softmax", "sigmoid", "tanh", "gelu"})
_UNQUANTIZED_RESULT = frozenset({"softmax", "sigmoid", "tanh"})
# The call under way in this thread: each replica of a strategy has a thread.
_CONTEXT: contextvars.ContextVar[QuantContext | None] = contextvars.ContextVar(
    "context", default=None
)


class QuantizedActivation:
    """An activation function of a layer, with nodes before and after it.

    It replaces the function in the layer during calls of the layer only:
    configurations hold the function itself, and files name weights of a function that
    is a layer, such as `PReLU`, by the attribute that holds it. Replicas interleave
    within a call; a thread that calls the layer by itself gets the function alone.

    Args:
        layer: Layer with the function.
        path: Attribute that holds the function, such as `activation` or
            `cell.activation`.
        make_node: Function from the name of a node to the node.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        path: str,
        make_node: Callable[[str], FakeQuantNode],
    ) -> None:
        parent, _, attribute = path.rpartition(".")
        owner = operator.attrgetter(parent)(layer) if parent else layer
        self._function = getattr(owner, attribute)
        self._substitution = keras_internals.substitution.SharedSubstitution(
            owner, attribute, self
        )
        self._before: FakeQuantNode | None = None
        self._after: FakeQuantNode | None = None
        if _name(self._function) in _QUANTIZED_ARGUMENT:
            self._before = make_node("pre_activation")
        if has_quantized_result(self._function):
            self._after = make_node("post_activation")
        self.nodes = [node for node in (self._before, self._after) if node]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Applies the function, with fake quantization around it."""
        context = _CONTEXT.get()
        if context is None:
            return self._function(x)
        if self._before is not None:
            x = self._before.fake_quantize(x, context)
        x = self._function(x)
        if self._after is not None:
            x = self._after.fake_quantize(x, context)
        return x

    @contextlib.contextmanager
    def replacing_function(self, context: QuantContext) -> Iterator[None]:
        """Replaces the function for one call of the layer."""
        token = _CONTEXT.set(context)
        try:
            with self._substitution:
                yield
        finally:
            _CONTEXT.reset(token)


def has_quantized_result(function: Any) -> bool:
    """Returns whether the result of an activation function is quantized."""
    return _name(function) not in _UNQUANTIZED_RESULT


def _name(function: Any) -> str:
    """Returns the name of an activation function, or of a layer that is one."""
    return getattr(function, "__name__", type(function).__name__).lower()
