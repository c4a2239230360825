"""Fake-quant nodes: where tensors of a layer are rounded, and when ranges are updated.

A pipeline splits a mini-batch, and its result must not depend on how. So within a step
every microbatch, and every recomputation, quantizes with the range stored before the
step. Observations are accumulated, and the range is updated once:

    microbatch        0          1          2         the step
    quantizes with    stored     stored     stored
    observes          [-1, 3] ─▶ [-2, 3] ─▶ [-2, 5]   ──▶ update(stored, [-2, 5])

That is `range_update="per_step"`. Weights, which are the same for all microbatches, are
quantized with the range after the update. `"per_call"` is the order of
tensorflow-model-optimization: each call updates the range and then quantizes with it,
so microbatches use ranges that others have updated.
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
from tfgpipe._util import argument_checks
from tfgpipe.capture import Accumulator, TracingScope
from tfgpipe.distribution import current_strategy
from tfgpipe.quantization.ranges import Bounds, Range

RangeUpdate = Literal["per_step", "per_call"]
# The choices of `range_update`.
RANGE_UPDATES: tuple[RangeUpdate, ...] = ("per_step", "per_call")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantSchedule:
    """The steps in which a layer quantizes, and in which its ranges are updated.

    Attributes:
        range_update: Update of ranges: `"per_step"` or `"per_call"`.
        delay: The number of updates after which quantizing starts.
        freeze_after: The number of updates after which ranges stay; None for never.

    Raises:
        ValueError: If a value is out of bounds.
    """

    range_update: RangeUpdate = "per_step"
    delay: int = 0
    freeze_after: int | None = None

    def __post_init__(self) -> None:
        argument_checks.check_choice("range_update", self.range_update, RANGE_UPDATES)
        argument_checks.check_count("delay", self.delay, least=0)
        if self.freeze_after is None:
            return
        argument_checks.check_count("freeze_after", self.freeze_after)
        if self.freeze_after < self.delay:
            raise ValueError(
                "Ranges stay after `freeze_after` steps, which is not before "
                f"quantizing starts, after `delay`. Received delay={self.delay}, "
                f"freeze_after={self.freeze_after}. Use None for ranges that never "
                "stay."
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return dataclasses.asdict(self)

    def add_counter(self, layer: keras.layers.Layer) -> keras.Variable:
        """Adds the variable that counts the updates of a layer's ranges."""
        return layer.add_weight(
            name="num_updates",
            shape=(),
            initializer="zeros",
            dtype="int32",
            trainable=False,
            autocast=False,
        )


class FakeQuantNode(abc.ABC):
    """Fake-quantizes one tensor of a layer.

    Attributes:
        variables: The range: the low end, then the high one.
        needs_calibration: True if the range is unknown before training.
    """

    variables: tuple[keras.Variable, ...]
    needs_calibration: bool = True

    @abc.abstractmethod
    def fake_quantize(self, x: tf.Tensor, context: QuantContext) -> tf.Tensor:
        """Returns the tensor rounded, in its own type."""

    def set_range(self, x: tf.Tensor) -> None:
        """Sets the range to that of a tensor; those of other libraries stay."""
        del x


class ExternalQuantizer(abc.ABC):
    """An observer of another library, with arithmetic of its own.

    It updates its range itself, in each call.
    """

    @abc.abstractmethod
    def make_node(
        self, layer: keras.layers.Layer, name: str, shape: Any
    ) -> FakeQuantNode:
        """Creates a node; arguments as of the function `make_node`."""


Observer: TypeAlias = Range | ExternalQuantizer


def make_node(
    layer: Any,
    name: str,
    observer: Observer,
    shape: Any = None,
    *,
    is_weight: bool = False,
) -> FakeQuantNode:
    """Creates a fake-quant node.

    Args:
        layer: The layer that has the variables of the range, with a `schedule`.
        name: The name of the tensor.
        observer: The observer.
        shape: The shape of the tensor, or None if it is not known.
        is_weight: True if the tensor is the same for all microbatches of a step.

    Raises:
        ValueError: If the range is per channel and the number of channels is not known,
            or the observer does not fit the schedule.
    """
    if isinstance(observer, ExternalQuantizer):
        if layer.schedule.range_update == "per_step":
            raise ValueError(
                "A quantizer of tfmot's updates its range itself, in each call. "
                f"Received one for '{name}' of layer '{layer.name}' with "
                'range_update="per_step". Use range_update="per_call", or an observer '
                "of `tfgpipe.quantization`, which can wait for the end of the step."
            )
        return observer.make_node(layer, name, shape)
    sizes: tuple[int, ...] = ()
    if observer.axis is not None:
        size = None if shape is None else tuple(shape)[observer.axis]
        if size is None:
            raise ValueError(
                "A range for each channel needs the number of channels. Received "
                f"axis={observer.axis} for '{name}' of layer '{layer.name}', "
                f"whose shape is {shape}. Use axis=None for activations; weights "
                "have known shapes."
            )
        sizes = (size,)
    variables = tuple(
        layer.add_weight(
            name=f"{name}_{end}",
            shape=sizes,
            initializer=keras.initializers.Constant(value),
            dtype="float32",
            trainable=False,
            autocast=False,
        )
        for end, value in zip(("min", "max"), observer.initial, strict=True)
    )
    return RangeNode(observer, variables, is_weight=is_weight)


class RangeNode(FakeQuantNode):
    """A node with an observed range."""

    def __init__(
        self, observer: Range, variables: tuple[keras.Variable, ...], *, is_weight: bool
    ) -> None:
        self.observer = observer
        self.variables = variables
        self.needs_calibration = not observer.is_fixed
        self._is_weight = is_weight

    def fake_quantize(self, x: tf.Tensor, context: QuantContext) -> tf.Tensor:
        """Returns the tensor rounded to the levels of the range, in its own type."""
        if not x.dtype.is_floating:
            return x
        bounds = Bounds(*(tf.convert_to_tensor(v.value) for v in self.variables))
        if context.updates_ranges and self.needs_calibration:
            observed = self.observer.observe(tf.stop_gradient(tf.cast(x, tf.float32)))
            updated = context.observe(self, observed, stored=bounds)
            if self._is_weight or context.schedule.range_update == "per_call":
                bounds = updated
        return context.delayed(self.observer.fake_quantize(x, bounds), x)

    def set_range(self, x: tf.Tensor) -> None:
        """Sets the range to that of a tensor."""
        if self.needs_calibration:
            observed = self.observer.observe(tf.cast(x, tf.float32))
            for variable, end in zip(self.variables, observed, strict=True):
                variable.assign(end)


class QuantContext(Accumulator):
    """One call of a layer: when its nodes quantize, and the ranges that they observe.

    With `"per_step"` it is also the accumulator of these ranges over microbatches.

    Args:
        layer: The layer, with a `schedule` and the counter `num_updates`.
        training: True to update ranges.
        inputs: The inputs of the call. An empty batch observes nothing.
    """

    def __init__(self, layer: Any, *, training: bool | None, inputs: Any) -> None:
        self.schedule: QuantSchedule = layer.schedule
        self.updates_ranges = bool(training) and layer.trainable
        self._num_updates = layer.num_updates
        self._count = tf.convert_to_tensor(self._num_updates.value)
        tensors = [x for x in keras.tree.flatten(inputs) if keras.ops.is_tensor(x)]
        self._has_data = tf.size(tensors[0]) > 0 if tensors else tf.constant(True)
        self._observed: list[tuple[RangeNode, Bounds]] = []
        self._graph = _graph()

    def observe(self, node: RangeNode, observed: Bounds, *, stored: Bounds) -> Bounds:
        """Records the range of a tensor; returns the range that it is updated to.

        Raises:
            ValueError: If the tensor is one of each iteration of a loop.
        """
        if _graph() is not self._graph:
            raise ValueError(
                "A tensor inside a loop cannot be read after the loop, and its range "
                "is not known. Received an activation inside a recurrent layer's loop, "
                f"of a layer with the counter '{self._num_updates.path}'. Make the "
                "recurrent layer with `unroll=True`, or quantize its weights and its "
                "output alone."
            )
        updated = self._updated(node, stored, observed, self._count)
        if self.schedule.range_update == "per_step":
            self._observed.append((node, observed))
            return updated
        updated = _where(self._has_data, updated, stored)
        for variable, end in zip(node.variables, updated, strict=True):
            variable.assign(end)
        return updated

    def delayed(self, quantized: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """Returns a quantized tensor, or the tensor itself before the delay is over."""
        if not self.schedule.delay:
            return quantized
        return tf.where(self._count >= self.schedule.delay, quantized, x)

    def commit(self) -> None:
        """Updates the ranges: now, or in a pipeline at the end of the step."""
        if not self.updates_ranges:
            return
        if self.schedule.range_update == "per_call":
            increment = tf.cast(self._has_data, self._count.dtype)
            self._num_updates.assign(self._count + increment)
            return
        ranges = (v for node, _ in self._observed for v in node.variables)
        self.variables = (*ranges, self._num_updates)
        # Every range holds zero: zeros are neutral, and the widest is the maximum.
        ends = [end for _, (low, high) in self._observed for end in (-low, high)]
        flat = [tf.reshape(end, [-1]) for end in ends]
        flat.append(tf.cast(self._has_data, tf.float32)[None])
        self.values = [tf.concat(flat, axis=0)]
        scope = keras_internals.calls.current_stateless_scope()
        if isinstance(scope, TracingScope):
            scope.accumulators.append(self)
            return
        stored = [tf.convert_to_tensor(v.value) for v in self.variables]
        updated = self.update(self.values, stored)
        for variable, value in zip(self.variables, updated, strict=True):
            variable.assign(value)

    def merge(self, previous: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the ranges that hold those of all microbatches so far."""
        return [tf.maximum(previous[0], self.values[0])]

    def update(
        self, merged: Sequence[tf.Tensor], variable_values: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the updated ranges, and the number of updates."""
        sizes = [math.prod(variable.shape) for variable in self.variables[:-1]]
        *ends, has_data = tf.split(_maximum_over_replicas(merged[0]), [*sizes, 1])
        *bounds, count = variable_values
        counts = has_data[0] > 0
        after: list[tf.Tensor] = []
        for i, (node, _) in enumerate(self._observed):
            pair = slice(2 * i, 2 * i + 2)
            stored = Bounds(*bounds[pair])
            low, high = (
                tf.reshape(end, b.shape)
                for end, b in zip(ends[pair], stored, strict=True)
            )
            new = self._updated(node, stored, Bounds(-low, high), count)
            after += _where(counts, new, stored)
        return [*after, count + tf.cast(counts, count.dtype)]

    def _updated(
        self, node: RangeNode, stored: Bounds, observed: Bounds, count: tf.Tensor
    ) -> Bounds:
        """Returns the range of a node after an observation.

        An observation that is not finite does not count, as of a step that overflows in
        half precision: a moving average would never recover from it.
        """
        finite = [tf.reduce_all(tf.math.is_finite(end)) for end in observed]
        counts = tf.logical_and(*finite)
        freeze_after = self.schedule.freeze_after
        if freeze_after is not None:
            counts = tf.logical_and(counts, count < freeze_after)
        return _where(counts, node.observer.update(stored, observed, count), stored)


def fake_quantize_all(
    node: FakeQuantNode | None, tensors: Any, context: QuantContext
) -> Any:
    """Returns the tensors of a structure fake-quantized, with their masks."""

    def fake_quantize(x: Any) -> Any:
        if node is None or not keras.ops.is_tensor(x):
            return x
        quantized = node.fake_quantize(x, context)
        keras_internals.calls.set_mask(quantized, keras_internals.calls.get_mask(x))
        return quantized

    return keras.tree.map_structure(fake_quantize, tensors)


def _maximum_over_replicas(values: tf.Tensor) -> tf.Tensor:
    """Returns the maximum over replicas, each of which has observed other examples."""
    strategy = current_strategy()
    num_replicas = strategy.num_replicas
    if num_replicas == 1:
        return values
    # Strategies sum; each replica has a row of the sum to itself.
    own = tf.equal(tf.range(num_replicas)[:, None], strategy.replica_index)
    table = tf.where(own, values[None], tf.zeros_like(values)[None])
    table = strategy.sum_over_replicas(table)
    return tf.reduce_max(table, axis=0)


def _where(condition: tf.Tensor, new: Bounds, old: Bounds) -> Bounds:
    pairs = zip(new, old, strict=True)
    return Bounds(*(tf.where(condition, a, b) for a, b in pairs))


def _graph() -> tf.Graph | None:
    """Returns the graph being built, None in eager execution."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
