"""The places where a layer's tensors are quantized, and what one call sees there.

A pipeline cuts a mini-batch, and its result must not depend on how. So within a step
every microbatch, and every recomputation, quantizes with the range stored before the
step. What is seen is gathered, and the range moves once:

    microbatch        0          1          2         the step
    quantizes with    stored     stored     stored
    sees              [-1, 3] ─▶ [-2, 3] ─▶ [-2, 5]   ──▶ stored moves by [-2, 5]

That is `range_update="per_step"`. Weights, which are the same for all microbatches, are
quantized with the range that they are about to move. `"per_call"` is the order of
tensorflow-model-optimization: each call moves the range and then quantizes with it, so
microbatches see ranges that others have moved.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import keras
import tensorflow as tf

from tfgpipe import seams
from tfgpipe.quantization.ranges import Bounds, Range
from tfgpipe.statistic import Statistic
from tfgpipe.trace import Scope

RangeUpdate = Literal["per_step", "per_call"]
RANGE_UPDATES: tuple[RangeUpdate, ...] = ("per_step", "per_call")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """When a layer quantizes, and when its ranges move.

    Attributes:
        range_update: Whether ranges move once a step, or with each call.
        delay: After how many moves of the ranges quantizing starts.
        freeze_after: After how many moves the ranges stay; None for never.
    """

    range_update: RangeUpdate = "per_step"
    delay: int = 0
    freeze_after: int | None = None

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this again."""
        return dataclasses.asdict(self)


class Point(abc.ABC):
    """A place where a tensor is quantized.

    Attributes:
        variables: Its range: the low end, then the high one.
    """

    variables: tuple[keras.Variable, ...]

    @abc.abstractmethod
    def quantized(self, x: tf.Tensor, observation: Observation) -> tf.Tensor:
        """Returns a tensor quantized."""


class Guest(abc.ABC):
    """What quantizes by arithmetic of its own, where a `Range` could."""

    @abc.abstractmethod
    def at(self, owner: keras.layers.Layer, name: str, shape: Any) -> Point:
        """Makes a point; arguments as of `point`."""


Observer: TypeAlias = Range | Guest


def point(
    owner: keras.layers.Layer,
    name: str,
    observer: Observer,
    shape: Any = None,
    *,
    of_weights: bool = False,
) -> Point:
    """Makes a point.

    Args:
        owner: The layer that keeps its variables.
        name: Its name.
        observer: What finds the range.
        shape: That of the tensor, or None if it is not known.
        of_weights: Whether the tensor is the same for all microbatches of a step.

    Raises:
        ValueError: If each channel is to have a range and their number is not known.
    """
    if isinstance(observer, Range):
        return RangePoint(owner, name, observer, shape, of_weights=of_weights)
    return observer.at(owner, name, shape)


class RangePoint(Point):
    """A point whose tensor is quantized with an observed range.

    Arguments and errors are those of `point`.
    """

    def __init__(
        self,
        owner: keras.layers.Layer,
        name: str,
        observer: Range,
        shape: Any,
        *,
        of_weights: bool,
    ) -> None:
        self.observer = observer
        self._of_weights = of_weights
        sizes: tuple[int, ...] = ()
        if observer.axis is not None:
            size = None if shape is None else tuple(shape)[observer.axis]
            if size is None:
                raise ValueError(
                    "A range for each channel needs to know how many there are. "
                    f"Received axis={observer.axis} for '{name}' of layer "
                    f"'{owner.name}', whose shape is {shape}. Use axis=None for "
                    "activations; weights have known shapes."
                )
            sizes = (size,)
        self.variables = tuple(
            owner.add_weight(
                name=f"{name}_{end}",
                shape=sizes,
                initializer=keras.initializers.Constant(value),
                dtype="float32",
                trainable=False,
                autocast=False,
            )
            for end, value in zip(("min", "max"), observer.initial, strict=True)
        )

    @property
    def bounds(self) -> Bounds:
        """The range as it is stored."""
        return Bounds(*(tf.convert_to_tensor(v.value) for v in self.variables))

    def quantized(self, x: tf.Tensor, observation: Observation) -> tf.Tensor:
        """Returns a tensor quantized."""
        if not (x.dtype.is_floating or x.dtype.is_complex):
            return x
        bounds = self.bounds
        if observation.moves and not self.observer.is_fixed:
            seen = self.observer.seen(tf.stop_gradient(tf.cast(x, tf.float32)))
            now = observation.note(self, seen, before=bounds)
            if self._of_weights or observation.timing.range_update == "per_call":
                bounds = now
        return observation.started(self.observer.quantized(x, bounds), x)

    def set(self, x: tf.Tensor) -> None:
        """Sets the range to what is seen of a tensor."""
        if not self.observer.is_fixed:
            seen = self.observer.seen(tf.cast(x, tf.float32))
            for variable, end in zip(self.variables, seen, strict=True):
                variable.assign(end)

    def moved(
        self,
        before: Bounds,
        seen: Bounds,
        count: tf.Tensor,
        freeze_after: int | None,
    ) -> Bounds:
        """Returns the range after something was seen, if it is to move at all.

        It does not by what is not finite, as of a step that overflows in half
        precision, which it would never recover from.
        """
        finite = [tf.reduce_all(tf.math.is_finite(end)) for end in seen]
        moves = tf.logical_and(*finite)
        if freeze_after is not None:
            moves = tf.logical_and(moves, count < freeze_after)
        after = self.observer.moved(before, seen, count)
        return Bounds(
            *(tf.where(moves, a, b) for a, b in zip(after, before, strict=True))
        )


class Observation:
    """What one call of a layer quantizes with, and sees.

    Args:
        count: The variable that counts how often the layer's ranges have moved.
        timing: When it quantizes and when its ranges move.
        moves: Whether the ranges move, as in training.
    """

    def __init__(self, count: keras.Variable, timing: Timing, *, moves: bool) -> None:
        self.timing = timing
        self.moves = moves
        self._variable = count
        self._count = tf.convert_to_tensor(count.value)
        self._seen: list[tuple[RangePoint, Bounds]] = []

    def note(self, point: RangePoint, seen: Bounds, *, before: Bounds) -> Bounds:
        """Notes the range of a tensor; returns what it makes of the stored one."""
        freeze_after = self.timing.freeze_after
        after = point.moved(before, seen, self._count, freeze_after)
        if self.timing.range_update == "per_step":
            self._seen.append((point, seen))
        else:
            for variable, end in zip(point.variables, after, strict=True):
                variable.assign(end)
        return after

    def started(self, quantized: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """Returns a quantized tensor, or the tensor itself before the delay is over."""
        if not self.timing.delay:
            return quantized
        return tf.where(self._count >= self.timing.delay, quantized, x)

    def commit(self) -> None:
        """Has the ranges move: now, or in a pipeline at the end of the step."""
        if not self.moves:
            return
        if self.timing.range_update == "per_call":
            self._variable.assign(self._count + 1)
            return
        seen = SeenRanges(self._seen, self._variable, self.timing.freeze_after)
        scope = seams.current_stateless_scope()
        if isinstance(scope, Scope):
            scope.statistics.append(seen)
            return
        before = [tf.convert_to_tensor(v.value) for v in seen.variables]
        after = seen.update(seen.values, before)
        for variable, value in zip(seen.variables, after, strict=True):
            variable.assign(value)


class SeenRanges(Statistic):
    """The ranges that one call of a layer has seen.

    Args:
        seen: The points, with what each has seen.
        count: The variable that counts how often the ranges have moved.
        freeze_after: As of `Timing`.
    """

    def __init__(
        self,
        seen: Sequence[tuple[RangePoint, Bounds]],
        count: keras.Variable,
        freeze_after: int | None,
    ) -> None:
        self._points = [point for point, _ in seen]
        self._freeze_after = freeze_after
        ends = [v for point in self._points for v in point.variables]
        self.variables = (*ends, count)
        # Every range holds zero: so zeros say nothing, and the widest is the maximum.
        parts = [end for _, (low, high) in seen for end in (-low, high)]
        flat = [tf.reshape(part, [-1]) for part in parts]
        self.values = [tf.concat([*flat, tf.ones([1])], axis=0)]

    def merge(self, earlier: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the ranges that hold what all microbatches so far have seen."""
        return [tf.maximum(earlier[0], self.values[0])]

    def update(
        self, whole: Sequence[tf.Tensor], before: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the ranges moved by what was seen, and how often they have."""
        sizes = [math.prod(variable.shape) for variable in self.variables[:-1]]
        *ends, something = tf.split(whole[0], [*sizes, 1])
        *bounds, count = before
        moves = something[0] > 0
        after = []
        for number, point in enumerate(self._points):
            pair = slice(2 * number, 2 * number + 2)
            stored = Bounds(*bounds[pair])
            low, high = (
                tf.reshape(end, b.shape)
                for end, b in zip(ends[pair], stored, strict=True)
            )
            new = point.moved(stored, Bounds(-low, high), count, self._freeze_after)
            after += [tf.where(moves, n, s) for n, s in zip(new, stored, strict=True)]
        return [*after, count + tf.cast(moves, count.dtype)]
