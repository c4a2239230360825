"""A pipeline that ends in its loss, so that a mini-batch can be run all the way.

The loss and the metrics are one more call at the end of the last stage, and targets and
sample weights more inputs that go straight there. Outputs of the whole mini-batch are
never put together, unless a metric needs them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.capture import Call, Network, Part, Replay, Value, Wire, layer_variables
from tfgpipe.devices import device_kind
from tfgpipe.distribution import replica_context
from tfgpipe.runtime import loss_probes, losses, microbatch
from tfgpipe.runtime.assembly import Assembly
from tfgpipe.runtime.executor import Result, TrainResult
from tfgpipe.runtime.pipeline import Pipeline
from tfgpipe.runtime.timer import Clock
from tfgpipe.schedules import Schedule
from tfgpipe.stage import GraphSource, trace_joint


class LossPipeline:
    """The stages of a model with its loss at their end.

    Args:
        assembly: The model, cut into stages.
        compiled: Its losses and metrics, built.
        targets: The targets it is made for: tensors, nested as Keras nests them.
        weights: The sample weights it is made for, likewise, or None.

    Raises:
        ValueError: If a loss mixes the rows of a batch.
    """

    def __init__(
        self,
        assembly: Assembly,
        compiled: keras_internals.Compiled,
        targets: Any,
        weights: Any,
    ) -> None:
        self._assembly = assembly
        self._compiled = compiled
        network = assembly.recorded.network
        shapes = keras.tree.map_structure(
            lambda value: assembly.recorded.specs[value.number],
            assembly.recorded.output,
        )
        self._shapes = shapes
        self._kinds = loss_probes.kinds_of(compiled, targets, shapes)
        self._whole = loss_probes.metrics_of_the_whole(compiled, targets, shapes)
        if self._whole and replica_context.current_num_replicas() > 1:
            raise ValueError(
                "A metric that mixes the rows of a batch cannot be taken over "
                "replicas, each of which has some of the rows. Received "
                f"{', '.join(map(repr, self._whole.values()))}. Return a value for "
                "each row, of which Keras takes the mean, or leave them out."
            )
        if self._whole:
            warnings.warn(
                "Outputs of the whole mini-batch are kept for metrics that cannot be "
                "taken of one microbatch after the other. Received "
                f"{', '.join(map(repr, self._whole.values()))}, which mix rows or "
                "weigh all batches alike. Leave them out to save that memory.",
                stacklevel=2,
            )
        numbers = iter(range(len(assembly.recorded.specs), 2**31))

        def numbered(structure: Any) -> Any:
            return keras.tree.map_structure(
                lambda x: None if x is None else Value(next(numbers)), structure
            )

        self._targets, self._weights = numbered(targets), numbered(weights)
        self._extents = Value(next(numbers))
        self._loss = Wire(next(numbers))
        self._parts = Wire(next(numbers))
        self._head = losses.Head(compiled, self._kinds, self._whole)
        args = (
            self._targets,
            assembly.recorded.output,
            self._weights,
            self._extents,
        )
        leaves = [x for x in keras.tree.flatten(args) if isinstance(x, Value)]
        reads = tuple(dict.fromkeys(value.number for value in leaves))
        made = (self._loss.number, self._parts.number)
        call = Call(self._head, args, {}, reads, made)
        given = [n for n in reads if n not in network.outputs]
        kept = network.outputs if self._whole else ()
        self._network = Network(
            (*network.calls, call), (*network.inputs, *given), (*made, *kept)
        )
        last = assembly.stages[-1]
        first_call = len(network.calls) - len(last.part.calls)
        part = self._network.part(slice(first_call, len(self._network.calls)))
        self._stages = (*assembly.stages[:-1], last.extended(part, compiled.variables))
        self._mask_programs: dict[Hashable, Callable[..., dict[int, tf.Tensor]]] = {}

    def train(
        self,
        inputs: Mapping[Wire, tf.Tensor],
        targets: Any,
        weights: Any,
        *,
        schedule: Schedule,
        loss_grad: tf.Tensor,
        clock: Clock | None = None,
    ) -> TrainResult:
        """Runs a mini-batch forward and backward, and updates metrics.

        Args:
            inputs: What goes into the model, `[B, ...]` each.
            targets: As this was made for.
            weights: Likewise.
            schedule: The order of the actions.
            loss_grad: The gradient of the loss.
            clock: What to time the actions with, if at all.
        """
        kept = (self._parts.number, *(self._outputs if self._whole else ()))
        engine = self._engine(schedule, wanted=kept, constant=self._network.inputs)
        wires = self._fed(engine, inputs, targets, weights, training=True)
        engine = dataclasses.replace(engine, clock=clock)
        loss_grad = tf.cast(loss_grad, self._head.dtype)
        share = tf.cast(replica_context.share_of_rows(_first(inputs)), loss_grad.dtype)
        result = engine.train(
            wires,
            loss=self._loss,
            loss_grad=loss_grad,
            added_loss_grad=loss_grad * share,
        )
        self._update(result, targets, weights, _first(inputs).shape[0])
        return result

    def evaluate(
        self,
        inputs: Mapping[Wire, tf.Tensor],
        targets: Any,
        weights: Any,
        *,
        schedule: Schedule,
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Runs a mini-batch forward, updates metrics, and returns its losses.

        Returns:
            The loss, and what layers add to it, if any does.
        """
        engine = self._engine(schedule, wanted=self._network.outputs)
        wires = self._fed(engine, inputs, targets, weights, training=False)
        result = engine.run(wires, training=False)
        self._update(result, targets, weights, _first(inputs).shape[0])
        return tf.reduce_sum(result.outputs[self._loss]), result.loss

    @property
    def _outputs(self) -> tuple[int, ...]:
        return self._assembly.recorded.network.outputs

    def _engine(
        self,
        schedule: Schedule,
        *,
        wanted: tuple[int, ...],
        constant: tuple[int, ...] = (),
    ) -> Pipeline:
        return dataclasses.replace(
            self._assembly.engine(schedule),
            stages=self._stages,
            wanted=wanted,
            constant=constant,
        )

    def _fed(
        self,
        engine: Pipeline,
        inputs: Mapping[Wire, tf.Tensor],
        targets: Any,
        weights: Any,
        *,
        training: bool,
    ) -> dict[Wire, tf.Tensor]:
        """Returns what goes into the pipeline: inputs, targets, weights and extents."""
        given = {"an input": _first(inputs)}
        wires = dict(inputs)
        for name, values, tensors in (
            ("target", self._targets, targets),
            ("sample weights", self._weights, weights),
        ):
            flat = keras.tree.flatten(values), keras.tree.flatten(tensors)
            for number, (value, tensor) in enumerate(zip(*flat, strict=True)):
                if value is not None:
                    wires[Wire(value.number)] = tf.convert_to_tensor(tensor)
                    given[f"{name} {number}"] = wires[Wire(value.number)]
        microbatch.check_equal_batches(given)
        rows = tf.shape(given["an input"])[0]
        static = given["an input"].shape[0]
        extents = Wire(self._extents.number)
        # Only a trace of the last stage tells what is masked.
        shape = [rows if static is None else static, len(self._kinds)]
        wires[extents] = tf.zeros(shape, tf.float64)
        engine.trace(wires, training=training)
        outputs = self._stand_ins(inputs, rows, training=training)
        found = losses.extents(
            self._compiled,
            self._kinds,
            targets,
            outputs,
            weights,
            masks_values=self._head.masks_values,
        )
        wires[extents] = tf.broadcast_to(found, shape)
        return wires

    def _stand_ins(
        self, inputs: Mapping[Wire, tf.Tensor], rows: tf.Tensor, *, training: bool
    ) -> Any:
        """Returns zeros in the outputs' shapes with the outputs' masks on them."""
        masks: dict[int, tf.Tensor] = {}
        if any(self._head.masks_predictions):
            masks = self._masks(inputs, training=training)

        def stand_in(value: Value, like: keras.KerasTensor) -> tf.Tensor:
            mask = masks.get(value.number)
            sizes = [1 if n is None else n for n in like.shape]
            sizes[0] = rows
            if mask is not None:
                known = tf.unstack(tf.shape(mask))[: len(sizes)]
                sizes[: len(known)] = known
            zeros = tf.zeros(sizes, like.dtype)
            keras_internals.set_mask(zeros, mask)
            return zeros

        return keras.tree.map_structure(
            stand_in, self._assembly.recorded.output, self._shapes
        )

    def _masks(
        self, inputs: Mapping[Wire, tf.Tensor], *, training: bool
    ) -> dict[int, tf.Tensor]:
        """Returns the masks on the outputs, for the whole mini-batch.

        All layers are traced, but of all that they do only what masks depend on runs.
        """
        specs = {w: tf.TensorSpec(x.shape, x.dtype) for w, x in inputs.items()}
        key = (training, *specs.items())
        last = self._assembly.placement.devices[-1]
        if key not in self._mask_programs:
            core = last if device_kind(last) == "TPU" else None
            with tf.init_scope():
                self._mask_programs[key] = self._mask_program(
                    specs, core, training=training
                )
        with tf.device(last):
            return self._mask_programs[key](*inputs.values())

    def _mask_program(
        self, specs: Mapping[Wire, tf.TensorSpec], core: str | None, *, training: bool
    ) -> Callable[..., dict[int, tf.Tensor]]:
        network = self._assembly.recorded.network
        part = Part(network.calls, network.inputs, network.outputs)
        layers = [layer for stage in self._assembly.stages for layer in stage.layers]
        variables = [v for some in layer_variables(layers) for v in some]
        replay = Replay(part, list(specs), training=training, per_layer=False)
        traced = trace_joint(
            replay.body,
            input_specs=list(specs.values()),
            weights=[],
            state=variables,
            constant=range(len(specs)),
        )
        names = dict(zip(replay.makes, traced.outputs, strict=True))
        masks = {wire.number: name for wire, name in names.items() if wire.is_mask}
        excerpt = GraphSource(traced, on_one_device=True).excerpt(
            fetches=list(masks.values()), feeds=(*traced.inputs, *traced.state)
        )

        @tf.function(autograph=False)
        def program(*tensors: tf.Tensor) -> dict[int, tf.Tensor]:
            values = dict(zip(traced.inputs, tensors, strict=True))
            for variable, name in zip(variables, traced.state, strict=True):
                if name in excerpt.feeds:
                    values[name] = tf.convert_to_tensor(variable.value)
            with tf.device(core):  # For XLA, which asks where each operation is.
                made = excerpt.run(*(values[feed] for feed in excerpt.feeds))
            found = dict(zip(excerpt.fetches, made, strict=True))
            return {number: found[name] for number, name in masks.items()}

        return program

    def _update(self, result: Result, targets: Any, weights: Any, rows: Any) -> None:
        """Assigns what the step changed, and updates what needs the whole mini-batch.

        Args:
            result: Of the step.
            targets: Of the mini-batch.
            weights: Likewise.
            rows: Their number, if it is known before they are there: by it Keras weighs
                the mini-batches in the means of single losses.
        """
        for change in result.changes:
            replica_context.assign(change.variable, change.value)
        number = replica_context.current_num_replicas()
        if rows is not None and number > 1:
            rows = (
                replica_context.sum_over_replicas(tf.constant(rows, self._head.dtype))
                / number
            )
        parts = tf.unstack(tf.reduce_sum(result.outputs[self._parts], 0))
        for tracker, part in zip(self._compiled.loss_trackers, parts, strict=False):
            # The metric adds up what all replicas give it.
            tracker.update_state(part * number, sample_weight=rows)
        if self._whole:
            outputs = self._assembly.structured(result.outputs)
            losses.update_metrics(
                self._compiled, targets, outputs, weights, lambda n: n in self._whole
            )


def _first(inputs: Mapping[Wire, tf.Tensor]) -> tf.Tensor:
    return next(iter(inputs.values()))
