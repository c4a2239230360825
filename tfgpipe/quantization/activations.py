"""Activation functions with what goes into them, or comes out of them, quantized.

Which of the two is decided by how TFLite runs them: fused with the layer's product,
whose result is then never seen, or as operations of their own, which take integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfgpipe.quantization.points import Observation, Point

# As tensorflow-model-optimization has them; any other is like those it fuses.
_BEFORE = frozenset({"softmax", "sigmoid", "tanh", "gelu"})
_NOT_AFTER = frozenset({"softmax", "sigmoid", "tanh"})


@dataclasses.dataclass(frozen=True)
class QuantizedActivation:
    """An activation function between points.

    Attributes:
        function: The function.
        before: What quantizes its argument, or None.
        after: What quantizes its result, or None.
    """

    function: Callable[..., tf.Tensor]
    before: Point | None
    after: Point | None

    def __call__(self, x: tf.Tensor, *, observation: Observation) -> tf.Tensor:
        """Applies the function, quantizing around it."""
        if self.before is not None:
            x = self.before.quantized(x, observation)
        x = self.function(x)
        if self.after is not None:
            x = self.after.quantized(x, observation)
        return x


def around(
    function: Callable[..., tf.Tensor], make: Callable[[str], Point]
) -> QuantizedActivation:
    """Returns an activation function with the points it takes.

    Args:
        function: The function, or a layer that is one.
        make: Makes the point of a name.
    """
    name = name_of(function)
    before = make("pre_activation") if name in _BEFORE else None
    after = make("post_activation") if has_quantized_result(function) else None
    return QuantizedActivation(function, before, after)


def name_of(function: Any) -> str:
    """Returns the name of an activation function, or of a layer that is one."""
    return getattr(function, "__name__", type(function).__name__).lower()


def has_quantized_result(function: Any) -> bool:
    """Returns whether the result of an activation function is quantized."""
    return name_of(function) not in _NOT_AFTER
