"""The interpreter: runs the captured calls of a segment on tensors.

In Keras a mask is an attribute of a tensor, which neither a function's boundary nor a
copy to a device preserves. Here masks are values of their own, put on their tensors
before the first call of a segment and taken off after the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._compat.keras_internals import calls as keras_calls
from tfgpipe._util import unique
from tfgpipe.capture.ir import Call, CallGraph, Segment, Value
from tfgpipe.capture.scope import (
    Accumulator,
    TracingScope,
    is_differentiable,
)
from tfgpipe.remat import Remat

Values = dict[int, tf.Tensor | None]


class TensorKey(NamedTuple):
    """Identifies a tensor between segments: a value, or the mask on it."""

    value_id: int
    is_mask: bool = False


class Interpreter:
    """Runs the calls of a segment, as a function of tensors by key.

    Args:
        segment: The calls.
        input_keys: Keys of the tensors that it takes. An input value of the segment
            that is not among them is None, as an optional input of a model can be.
        training: Mode in which layers run; None leaves it to each.
        remat: The policy that says which calls a gradient recomputes together, from
            their inputs alone. None recomputes none.
        captured: Variables that the calls use though those of other layers.
    """

    def __init__(
        self,
        segment: Segment,
        input_keys: Sequence[TensorKey],
        *,
        training: bool | None,
        remat: Remat | None = None,
        captured: Sequence[keras.Variable] = (),
    ) -> None:
        self._segment = segment
        self._input_keys = tuple(input_keys)
        self._training = training
        self._captured = captured
        # What is recomputed together, with the index of the first of its calls.
        self._parts: list[tuple[int, Segment]] = []
        num_calls = len(segment.calls)
        if remat is not None and remat.has_segments(num_calls):
            graph = CallGraph(segment.calls, segment.input_ids, segment.output_ids)
            spans = remat.segments(num_calls)
            self._parts = [(span.start, graph.segment(span)) for span in spans]

    def run(self, tensors: Sequence[tf.Tensor]) -> dict[TensorKey, tf.Tensor | None]:
        """Runs the calls.

        Args:
            tensors: The inputs, one for each of the input keys.

        Returns:
            The inputs of later segments, by key; None for the mask of an input that the
            segment has taken off its tensor, as attention layers do.
        """
        inputs = dict(zip(self._input_keys, tensors, strict=True))
        values = {i: inputs.get(TensorKey(i)) for i in self._segment.input_ids}
        masked = [key.value_id for key in inputs if key.is_mask]
        for i in masked:
            keras_calls.set_mask(values[i], inputs[TensorKey(i, True)])
        if not self._parts:
            self._run_calls(self._segment.calls, values, _scope())
        for first, part in self._parts:
            outputs = self._run_with_remat(part, values, first)
            values.update(zip(part.output_ids, outputs, strict=True))
        results: dict[TensorKey, tf.Tensor | None] = {}
        for i in self._segment.output_ids:
            if values[i] is None:
                continue
            results[TensorKey(i)] = values[i]
            mask = keras_calls.get_mask(values[i])
            if mask is not None:
                results[TensorKey(i, True)] = mask
        for i in masked:
            if keras_calls.get_mask(values[i]) is None:
                results[TensorKey(i, True)] = None
        return results

    def _run_calls(
        self,
        calls: Sequence[Call],
        values: Values,
        scope: TracingScope,
        first: int = 0,
    ) -> None:
        """Adds what calls return to the values; `first` is the index of the first."""
        for index, call in enumerate(calls, first):
            args, kwargs = keras.tree.map_structure(
                lambda leaf: values[leaf.id] if isinstance(leaf, Value) else leaf,
                (call.args, dict(call.kwargs)),
            )
            if isinstance(call.layer, keras.layers.Layer) and (
                self._training is not None
            ):
                kwargs["training"] = self._training
            before = len(scope.losses)
            outputs = keras.tree.flatten(call.layer(*args, **kwargs))
            if call.read_losses is not None:
                examples = values[call.batch_id]
                assert examples is not None  # Layers have taken it.
                rows = examples.shape[0] or tf.shape(examples)[0]
                remaining, extra = call.read_losses(scope.losses[before:], rows)
                scope.losses[before:] = remaining
                outputs += extra
            values.update(zip(call.output_ids, outputs, strict=True))
            added = len(scope.losses) - len(scope.loss_calls)
            scope.loss_calls += [index] * added

    def _run_with_remat(
        self, part: Segment, values: Values, first: int
    ) -> list[tf.Tensor | None]:
        """Runs calls so that their gradient recomputes them from their inputs alone.

        `tf.recompute_grad` differentiates only with respect to arguments, so the
        weights are passed as such. It runs the calls twice; what layers assign, add as
        a loss or mask is taken from the first run, which is the forward pass.

        Returns:
            The values that others take from these calls.
        """
        scope = _scope()
        weights, state = layer_variables(part.layers, self._captured)
        state_values = [(v, scope.get_current_value(v)) for v in state]
        # Only tensors with a gradient are arguments: `tf.recompute_grad` adds to each.
        inputs = {i: values[i] for i in part.input_ids if values.get(i) is not None}
        ids = [i for i, tensor in inputs.items() if is_differentiable(tensor)]
        if not ids and not weights:
            inside = dict(values)
            self._run_calls(part.calls, inside, scope, first)
            return [inside[i] for i in part.output_ids]
        masks = {i: keras_calls.get_mask(tensor) for i, tensor in inputs.items()}
        effects: list[_SideEffects] = []

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            arguments = {**inputs, **dict(zip(ids, tensors, strict=False))}
            for i, tensor in arguments.items():
                keras_calls.set_mask(tensor, masks[i])
            weight_values = zip(weights, tensors[len(ids) :], strict=True)
            inner = TracingScope([*weight_values, *state_values], scope.replicas)
            inside = {**values, **arguments}
            with inner:
                self._run_calls(part.calls, inside, inner, first)
            outputs = [inside[i] for i in part.output_ids]
            inner.check_assignments([*weights, *state])
            scope.captured_variables += inner.captured_variables
            effects.append(_SideEffects.of(inner, arguments.values(), outputs))
            return [*outputs, *inner.losses]

        results = tf.recompute_grad(run)(
            *(values[i] for i in ids), *(scope.get_current_value(v) for v in weights)
        )
        outputs, losses = (
            results[: len(part.output_ids)],
            results[len(part.output_ids) :],
        )
        effects[0].repeat(scope, inputs.values(), outputs, losses)
        return list(outputs)


def layer_variables(
    layers: Iterable[Any], captured: Sequence[keras.Variable] = ()
) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Returns the trainable and the other variables of layers, each once.

    The others are statistics, seeds, frozen weights and the variables of layers' own
    metrics. Keras operations have neither.

    Args:
        layers: The layers.
        captured: Variables that they use though those of other layers.
    """
    owners = [layer for layer in layers if isinstance(layer, keras.layers.Layer)]
    # Not `layer.trainable_variables`: a frozen layer has none, though a layer inside it
    # may have been unfrozen since, as LoRA does. A Keras model trains that one.
    variables = [
        v
        for x in owners
        for v in (*x.variables, *keras_internals.layers.own_metrics(x))
    ]
    variables += captured
    trainable = unique(v for v in variables if v.trainable)
    return trainable, unique(v for v in variables if not v.trainable)


class _SideEffects(NamedTuple):
    """Side effects of the first run of calls, beside their outputs and losses."""

    updates: list[tuple[keras.Variable, tf.Tensor]]
    over_replicas: list[keras.Variable]
    accumulators: list[Accumulator]
    loss_calls: list[int]
    input_masks: list[tf.Tensor | None]
    output_masks: list[tf.Tensor | None]

    @classmethod
    def of(
        cls,
        scope: TracingScope,
        inputs: Iterable[tf.Tensor],
        outputs: Iterable[tf.Tensor | None],
    ) -> _SideEffects:
        """Returns those on a scope, and on the masks of inputs and outputs."""
        assigned = unique(scope.assigned_variables)
        return cls(
            updates=[(v, scope.get_current_value(v)) for v in assigned],
            over_replicas=scope.over_replicas,
            accumulators=scope.accumulators,
            loss_calls=scope.loss_calls,
            input_masks=list(map(keras_calls.get_mask, inputs)),
            output_masks=list(map(keras_calls.get_mask, outputs)),
        )

    def repeat(
        self,
        scope: TracingScope,
        inputs: Iterable[tf.Tensor],
        outputs: Iterable[tf.Tensor | None],
        losses: Iterable[tf.Tensor],
    ) -> None:
        """Has these effects on another scope, and on other tensors."""
        for update in self.updates:
            scope.add_update(update)
        scope.over_replicas.extend(self.over_replicas)
        scope.accumulators.extend(self.accumulators)
        for loss in losses:
            scope.add_loss(loss)
        scope.loss_calls.extend(self.loss_calls)
        for tensor, mask in zip(inputs, self.input_masks, strict=True):
            keras_calls.set_mask(tensor, mask)
        for tensor, mask in zip(outputs, self.output_masks, strict=True):
            keras_calls.set_mask(tensor, mask)


def _scope() -> TracingScope:
    scope = keras_calls.current_stateless_scope()
    assert isinstance(scope, TracingScope)
    return scope
