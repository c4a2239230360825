"""Observers: the range of values that the levels of an integer are spread over.

A tensor in `[low, high]` is rounded to the nearest of `2^bits` levels between the two,
and what lies outside is clipped. Every range here holds zero, so that padding and ReLU
are exact (Jacob et al. 2018, section 2.1). Observers differ in how a new observation
updates the range:

    MovingAverageRange   moves a step towards it: for activations
    LastValueRange       becomes it: for weights
    AllValuesRange       grows to hold it: for inputs
    FixedRange           stays: for what is known, such as pixels

Names, arithmetic and initial values are those of tensorflow-model-optimization.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import keras
import tensorflow as tf

from tfgpipe._util import argument_checks


class Bounds(NamedTuple):
    """The ends of a range, `[]` each, or `[C]` for a range a channel."""

    low: tf.Tensor
    high: tf.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range(abc.ABC):
    """An observer: finds the range of a tensor, and fake-quantizes it with the range.

    Attributes:
        bits: Bits of the integer, 2 to 16.
        symmetric: True for zero in the middle, as TFLite wants it for weights.
        narrow_range: True for one level less, so that with `symmetric` the middle one
            is zero: -127 to 127 for 8 bits.
        axis: The axis of which each position has a range of its own, or None.
        initial: The range before the first observation.
        is_fixed: True if the range never moves. An attribute of the class.

    Raises:
        ValueError: If a value is out of bounds.
    """

    is_fixed: ClassVar[bool] = False

    bits: int = 8
    symmetric: bool = False
    narrow_range: bool = False
    axis: int | None = None
    initial: tuple[float, float] = (-6.0, 6.0)

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ValueError(
                "Quantization is simulated for 2 to 16 bits. Received "
                f"bits={self.bits} for {type(self).__name__}. Use 8 for what is to run "
                "as int8."
            )
        object.__setattr__(self, "initial", tuple(map(float, self.initial)))
        ends = self.initial
        if len(ends) != 2 or not ends[0] <= 0 <= ends[1] or ends[0] == ends[1]:
            raise ValueError(
                "A range holds zero and is wider than that: with [0, 0] every tensor "
                f"becomes zero. Received {list(ends)} for {type(self).__name__}. "
                "Use (-6, 6) if nothing is known."
            )

    def observe(self, x: tf.Tensor) -> Bounds:
        """Returns the smallest range that holds a tensor and zero."""
        axes = None
        if self.axis is not None:
            axes = [a for a in range(len(x.shape)) if a != self.axis % len(x.shape)]
        low = tf.minimum(tf.reduce_min(x, axes), 0.0)
        high = tf.maximum(tf.reduce_max(x, axes), 0.0)
        if self.symmetric:
            levels = 1 << self.bits
            # In two's complement there is one more negative number than positive ones.
            ratio = -1 if self.narrow_range else -(levels - 2) / levels
            low, high = tf.minimum(low, high / ratio), tf.maximum(high, low * ratio)
        return Bounds(low, high)

    @abc.abstractmethod
    def update(self, before: Bounds, observed: Bounds, count: tf.Tensor) -> Bounds:
        """Returns the range after an observation.

        Args:
            before: The range so far.
            observed: The range of the tensor, from `observe`.
            count: The number of updates before.
        """

    def fake_quantize(self, x: tf.Tensor, bounds: Bounds) -> tf.Tensor:
        """Returns a tensor rounded to the levels of a range, in its own type.

        The gradient goes straight through, but not to what was clipped.
        """
        # Keras' function for this transposes even where the axis is the last.
        how = {"num_bits": self.bits, "narrow_range": self.narrow_range}
        single = tf.cast(x, tf.float32)
        if self.axis is None:
            result = tf.quantization.fake_quant_with_min_max_vars(
                single, *bounds, **how
            )
            return tf.cast(result, x.dtype)
        last, axis = len(x.shape) - 1, self.axis % len(x.shape)
        swapped = [last if a == axis else axis if a == last else a for a in range(last)]
        swapped.append(axis)
        if axis != last:
            single = tf.transpose(single, swapped)
        shape = tf.shape(single)
        if last > 3:  # The operation's gradient knows no more axes than four.
            single = tf.reshape(single, [-1, x.shape[axis]])
        result = tf.quantization.fake_quant_with_min_max_vars_per_channel(
            single, *bounds, **how
        )
        if last > 3:
            result = tf.reshape(result, shape)
        if axis != last:
            result = tf.transpose(result, swapped)
        return tf.cast(result, x.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this observer again."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Range:
        """Creates an observer from what `get_config` returned."""
        return cls(**{**config, "initial": tuple(config["initial"])})


@keras.saving.register_keras_serializable(package="tfgpipe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MovingAverageRange(Range):
    """A range that moves a step towards each observation.

    Attributes:
        decay: The weight of the old range.
        ramp: True for a weight that is smaller at first, `min(decay, n / (n + 9))` at
            the n-th update: the first replaces the initial range, and few hundred steps
            are enough to train with. By itself the initial range fades over thousands.

    Example:

    >>> observer = tfgpipe.quantization.MovingAverageRange(decay=0.9)
    >>> before = observer.observe(tf.constant([-4.0, 4.0]))
    >>> after = observer.update(before, observer.observe(tf.constant([0.0, 1.0])), 0)
    >>> [round(float(end), 6) for end in after]
    [-3.6, 3.7]
    """

    decay: float = 0.999
    ramp: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        argument_checks.check_choice("ramp", self.ramp, (True, False))
        if not 0 <= self.decay < 1:
            raise ValueError(
                "Of a moving average a part stays, and the rest moves. Received "
                f"decay={self.decay}. Use 0.999, or less for short training."
            )

    def update(self, before: Bounds, observed: Bounds, count: tf.Tensor) -> Bounds:
        """Returns the range a step nearer to the observation."""
        step: Any = 1.0 - self.decay
        if self.ramp:
            n = tf.cast(count, tf.float32)
            step = 1.0 - tf.minimum(self.decay, n / (n + 9.0))
        # In this order `tf.train.ExponentialMovingAverage` rounds.
        return Bounds(
            *(b - (b - s) * step for b, s in zip(before, observed, strict=True))
        )


@keras.saving.register_keras_serializable(package="tfgpipe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LastValueRange(Range):
    """The range of the last observation."""

    def update(self, before: Bounds, observed: Bounds, count: tf.Tensor) -> Bounds:
        """Returns the observed range."""
        del before, count
        return observed


@keras.saving.register_keras_serializable(package="tfgpipe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AllValuesRange(Range):
    """The range of all observations."""

    def update(self, before: Bounds, observed: Bounds, count: tf.Tensor) -> Bounds:
        """Returns the range widened to hold the observation."""
        first = tf.equal(count, 0)  # The initial range is no observation.
        low = tf.where(first, observed.low, tf.minimum(before.low, observed.low))
        high = tf.where(first, observed.high, tf.maximum(before.high, observed.high))
        return Bounds(low, high)


@keras.saving.register_keras_serializable(package="tfgpipe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedRange(Range):
    """A range that is known, `initial`, such as that of pixels."""

    is_fixed: ClassVar[bool] = True

    def update(self, before: Bounds, observed: Bounds, count: tf.Tensor) -> Bounds:
        """Returns the range as it is."""
        del observed, count
        return before
