"""Fake quantization by operations that take ranges from the memory of the device.

TensorFlow's kernels for GPUs take `min` and `max` from the memory of the host, which
waits for them at each microbatch, and XLA's differ from those for CPUs in the last bit
of a range's ends, where the largest weight may lie. So on both tensors are rounded by
elementwise operations, with the arithmetic of the kernel for CPUs, in its order:

    scale = (max - min) / (levels - 1)           the range is nudged, so that zero is
    zero_point = round(-min / scale)             a level: [low, high]
    zero = floor(-low / scale + 0.5)
    x -> floor((clip(x, low, high) - low) / scale - zero + 0.5) * scale

That takes several passes over the tensor in place of one. What is made of a range alone
is in one tensor, which can be hoisted if the range is the same for all microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfgpipe.graph.joint_graph import JointGraph

_FORWARD = ("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel")
_GRADIENT = (
    "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannelGradient",
)


class _Levels(NamedTuple):
    """The levels of a range: scalars, or one for each channel.

    Attributes:
        low: The lowest level.
        high: The highest.
        zero: The level of zero.
        scale: The distance of two levels; 0 if the range is, to round all to zero.
        divisor: The distance, or 1.
        low_passed: The lowest value that the gradient is passed for.
        high_passed: The highest one.
    """

    low: tf.Tensor
    high: tf.Tensor
    zero: tf.Tensor
    scale: tf.Tensor
    divisor: tf.Tensor
    low_passed: tf.Tensor
    high_passed: tf.Tensor


def fake_quant_on_device(joint: JointGraph) -> JointGraph:
    """Returns a joint graph whose fake quantizations read ranges on the device."""
    levels: dict[tuple[str, str, int, bool], tf.Tensor] = {}

    def form(
        op: tf.Operation, inputs: Callable[[tf.Operation], list[tf.Tensor]]
    ) -> tf.Tensor:
        *gradient, x, low, high = inputs(op)
        bits, narrow = op.get_attr("num_bits"), op.get_attr("narrow_range")
        key = low.name, high.name, bits, narrow
        if key not in levels:
            levels[key] = tf.stack(_levels(low, high, bits, narrow))
        known = _Levels(*tf.unstack(levels[key]))
        return _masked(gradient[0], x, known) if gradient else _rounded(x, known)

    return joint.replaced((*_FORWARD, *_GRADIENT), form)


def _levels(low: tf.Tensor, high: tf.Tensor, bits: int, narrow: bool) -> _Levels:
    """Returns the levels of a range."""
    first, last = float(narrow), float(2**bits - 1)
    nothing = tf.logical_and(tf.equal(low, 0.0), tf.equal(high, 0.0))
    # Compilers make a division by a constant a product, which differs in the last bit:
    # the largest of the values that a range was taken from may lie beyond it then, and
    # its gradient be masked. This divisor is no constant.
    scale = (high - low) / tf.where(tf.equal(high, low), 1.0, last - first)
    divisor = tf.where(nothing, 1.0, scale)
    point = first - low / divisor
    # Halves away from zero.
    whole = tf.floor(point)
    point = whole + tf.cast(point - whole >= 0.5, tf.float32)
    point = tf.clip_by_value(point, first, last)
    lowest, highest = (first - point) * scale, (last - point) * scale
    infinity = tf.fill(tf.shape(low), float("inf"))
    return _Levels(
        low=lowest,
        high=highest,
        zero=tf.floor(-lowest / divisor + 0.5),
        scale=scale,
        divisor=divisor,
        low_passed=tf.where(nothing, -infinity, lowest),
        high_passed=tf.where(nothing, infinity, highest),
    )


def _rounded(x: tf.Tensor, levels: _Levels) -> tf.Tensor:
    """Returns a tensor, each entry rounded to a level."""
    shifted = tf.maximum(tf.minimum(x, levels.high), levels.low) - levels.low
    index = tf.floor(shifted / levels.divisor - levels.zero + 0.5)
    return index * levels.scale


def _masked(gradient: tf.Tensor, x: tf.Tensor, levels: _Levels) -> tf.Tensor:
    """Returns the gradient of a rounded tensor, zero for what is out of its range."""
    inside = tf.logical_and(x >= levels.low_passed, x <= levels.high_passed)
    return gradient * tf.cast(inside, gradient.dtype)
