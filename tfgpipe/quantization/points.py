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

from tfgpipe._compat import keras_internals
from tfgpipe.capture import Accumulator, Scope
from tfgpipe.quantization.ranges import Bounds, Range

RangeUpdate = Literal["per_step", "per_call"]
# The choices of `range_update`: when ranges move.
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
        if not x.dtype.is_floating:
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
        return _where(moves, self.observer.moved(before, seen, count), before)


class Observation:
    """What one call of a layer quantizes with, and sees.

    Args:
        count: The variable that counts how often the layer's ranges have moved.
        timing: When it quantizes and when its ranges move.
        moves: Whether the ranges move, as in training.
        given: What the layer was called on. Of no rows there is nothing to see.
    """

    def __init__(
        self, count: keras.Variable, timing: Timing, *, moves: bool, given: Any
    ) -> None:
        self.timing = timing
        self.moves = moves
        self._variable = count
        self._count = tf.convert_to_tensor(count.value)
        tensors = [x for x in keras.tree.flatten(given) if keras.ops.is_tensor(x)]
        self._something = tf.size(tensors[0]) > 0 if tensors else tf.constant(True)
        self._seen: list[tuple[RangePoint, Bounds]] = []
        self._graph = _graph()

    def note(self, point: RangePoint, seen: Bounds, *, before: Bounds) -> Bounds:
        """Notes the range of a tensor; returns what it makes of the stored one.

        Raises:
            ValueError: If the tensor is one of each turn of a loop.
        """
        if _graph() is not self._graph:
            raise ValueError(
                "What a loop computes in each of its turns is not seen after it, and "
                "its range is not known. Received an activation inside a recurrent "
                f"layer's loop, of a layer with the counter '{self._variable.path}'. "
                "Make the recurrent layer with `unroll=True`, or quantize its weights "
                "and its output alone."
            )
        freeze_after = self.timing.freeze_after
        after = point.moved(before, seen, self._count, freeze_after)
        if self.timing.range_update == "per_step":
            self._seen.append((point, seen))
            return after
        after = _where(self._something, after, before)
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
            moved = tf.cast(self._something, self._count.dtype)
            self._variable.assign(self._count + moved)
            return
        seen = SeenRanges(
            self._seen, self._something, self._variable, self.timing.freeze_after
        )
        scope = keras_internals.current_stateless_scope()
        if isinstance(scope, Scope):
            scope.accumulators.append(seen)
            return
        before = [tf.convert_to_tensor(v.value) for v in seen.variables]
        after = seen.update(seen.values, before)
        for variable, value in zip(seen.variables, after, strict=True):
            variable.assign(value)


class SeenRanges(Accumulator):
    """The ranges that one call of a layer has seen.

    Args:
        seen: The points, with what each has seen.
        something: Whether there was anything to see.
        count: The variable that counts how often the ranges have moved.
        freeze_after: As of `Timing`.
    """

    def __init__(
        self,
        seen: Sequence[tuple[RangePoint, Bounds]],
        something: tf.Tensor,
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
        flat.append(tf.cast(something, tf.float32)[None])
        self.values = [tf.concat(flat, axis=0)]

    def merge(self, earlier: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the ranges that hold what all microbatches so far have seen."""
        return [tf.maximum(earlier[0], self.values[0])]

    def update(
        self, whole: Sequence[tf.Tensor], before: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the ranges moved by what was seen, and how often they have."""
        sizes = [math.prod(variable.shape) for variable in self.variables[:-1]]
        *ends, something = tf.split(_widest_of_replicas(whole[0]), [*sizes, 1])
        *bounds, count = before
        moves = something[0] > 0
        after: list[tf.Tensor] = []
        for number, point in enumerate(self._points):
            pair = slice(2 * number, 2 * number + 2)
            stored = Bounds(*bounds[pair])
            low, high = (
                tf.reshape(end, b.shape)
                for end, b in zip(ends[pair], stored, strict=True)
            )
            new = point.moved(stored, Bounds(-low, high), count, self._freeze_after)
            after += _where(moves, new, stored)
        return [*after, count + tf.cast(moves, count.dtype)]


def _widest_of_replicas(seen: tf.Tensor) -> tf.Tensor:
    """Returns the maximum over replicas, of which each has seen other rows."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return seen
    # Strategies sum; each replica has a row of the sum to itself.
    numbers = tf.range(context.num_replicas_in_sync)[:, None]
    mine = tf.equal(numbers, context.replica_id_in_sync_group)
    table = tf.where(mine, seen[None], tf.zeros_like(seen)[None])
    table = context.all_reduce(tf.distribute.ReduceOp.SUM, table)
    return tf.reduce_max(table, axis=0)


def _where(condition: tf.Tensor, after: Bounds, before: Bounds) -> Bounds:
    pairs = zip(after, before, strict=True)
    return Bounds(*(tf.where(condition, a, b) for a, b in pairs))


def _graph() -> tf.Graph | None:
    """Returns the graph being built, None if operations run at once."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
