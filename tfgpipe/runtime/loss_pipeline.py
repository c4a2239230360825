"""A pipeline whose last stage computes the loss, to train or evaluate a mini-batch.

The loss and the metrics are one more call at the end of the last stage, and targets and
sample weights more inputs that go straight there. Outputs of the whole mini-batch are
never gathered, unless a metric needs them.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.capture import Call, CallGraph, TensorKey, Value, input_checks
from tfgpipe.devices import small_functions
from tfgpipe.distribution import current_strategy
from tfgpipe.runtime import loss_probes, losses
from tfgpipe.runtime.coupled_layers import (
    CoupledLayers,
    add_losses,
    coupled_layers,
)
from tfgpipe.runtime.executor import Executor, StepResult, TrainStepResult
from tfgpipe.runtime.pipeline import Pipeline
from tfgpipe.runtime.step import Step
from tfgpipe.runtime.timer import StepTimer
from tfgpipe.schedules import Schedule
from tfgpipe.stage import OutputMasks


class LossPipeline:
    """The stages of a model with the loss appended to the last one.

    Args:
        pipeline: The model, in stages.
        compiled: Its losses and metrics, built.
        targets: The targets it is made for: tensors, nested as Keras nests them.
        sample_weights: The sample weights that it is made for, nested in the same way,
            or None.
        reductions: The reduction of each loss, or None to find it.

    Raises:
        ValueError: If a loss does not decompose over examples.
        RuntimeError: If replicas have no copies of a metric.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        compiled: keras_internals.compiled.CompiledState,
        targets: Any,
        sample_weights: Any,
        *,
        reductions: Sequence[loss_probes.Reduction] | None = None,
    ) -> None:
        _check_copies(compiled)
        self._compiled = compiled
        captured, graph = pipeline.captured, pipeline.captured.graph
        shapes = keras.tree.map_structure(
            lambda value: captured.specs[value.id], captured.output_structure
        )
        self._shapes = shapes
        self._reductions = reductions or loss_probes.probe_reductions(
            compiled, targets, shapes
        )
        num_replicas = current_strategy().num_replicas
        self._full_batch_metrics = loss_probes.full_batch_metrics(
            compiled, targets, shapes, num_replicas=num_replicas
        )
        _report_full_batch(self._full_batch_metrics.values(), num_replicas)
        self._coupled = {
            mode: coupled_layers(pipeline, training=mode) for mode in (True, False)
        }
        ids = itertools.count(
            max(len(x.pipeline.captured.specs) for x in self._coupled.values())
        )

        def values_of(structure: Any) -> Any:
            return keras.tree.map_structure(
                lambda x: None if x is None else Value(next(ids)), structure
            )

        self._targets = values_of(targets)
        self._sample_weights = values_of(sample_weights)
        self._denominators = TensorKey(next(ids))
        self._loss, self._loss_terms, self._masked = (
            TensorKey(next(ids)) for _ in range(3)
        )
        self._head = losses.LossHead(
            compiled, self._reductions, self._full_batch_metrics
        )
        # Ids of what is returned of a step: outputs, only if metrics need them.
        self._returned = (
            self._loss_terms.value_id,
            *(graph.output_ids if self._full_batch_metrics else ()),
        )
        call = self._call(captured.output_structure)
        self._output_masks = OutputMasks(graph, pipeline.strategy.primary_devices[-1])
        self._pipeline = pipeline
        # By mode, in training and not, with the loss.
        self._pipelines = {
            mode: self._with_loss(coupled, call)
            for mode, coupled in self._coupled.items()
        }
        _report_coupled(self._coupled[True])

    def _call(self, outputs: Any) -> Call:
        """Returns the call of the loss on the outputs."""
        denominators = Value(self._denominators.value_id)
        args = (
            self._targets,
            outputs,
            self._sample_weights,
            denominators,
        )
        leaves = [x for x in keras.tree.flatten(args) if isinstance(x, Value)]
        input_ids = tuple(dict.fromkeys(value.id for value in leaves))
        output_ids = tuple(
            key.value_id for key in (self._loss, self._loss_terms, self._masked)
        )
        return Call(self._head, args, {}, input_ids, output_ids)

    def _with_loss(self, coupled: CoupledLayers, loss: Call) -> Pipeline:
        """Returns a pipeline with the call of the loss behind the last stage."""
        pipeline, cuts = coupled.pipeline, [key.value_id for key in coupled.keys]
        graph, last = pipeline.captured.graph, pipeline.stages[-1]
        new_inputs = [n for n in loss.input_ids if n not in graph.output_ids]
        with_loss = CallGraph(
            (*graph.calls, loss),
            (*graph.input_ids, *new_inputs),
            (*loss.output_ids, *self._returned[1:], *cuts),
        )
        first_call = len(graph.calls) - len(last.segment.calls)
        segment = with_loss.segment(slice(first_call, len(with_loss.calls)))
        extended = last.extend(segment, self._compiled.variables)
        return dataclasses.replace(pipeline, stages=(*pipeline.stages[:-1], extended))

    def train(
        self,
        inputs: Mapping[TensorKey, tf.Tensor],
        targets: Any,
        weights: Any,
        *,
        schedule: Schedule,
        loss_grad: tf.Tensor,
        timer: StepTimer | None = None,
    ) -> TrainStepResult:
        """Runs a mini-batch forward and backward, and updates metrics.

        Args:
            inputs: The inputs of the model, `[B, ...]` each.
            targets: Targets of the structure that this was made for.
            weights: Sample weights, nested as the targets.
            schedule: The order of the actions.
            loss_grad: The gradient of the loss.
            timer: Times the actions, if given.
        """
        step, feeds = self._begin(
            inputs, targets, weights, schedule, self._returned, training=True
        )
        with small_functions.scalars_scope(self._pipeline.strategy.primary_devices[-1]):
            loss_grad = tf.cast(loss_grad, self._head.dtype)
            share = current_strategy().batch_fraction(_first(inputs))
            added_loss_grad = loss_grad * tf.cast(share, loss_grad.dtype)
        coupled = self._coupled[True]
        grads: dict[TensorKey, tf.Tensor] = {}
        if coupled.keys:
            coupled_loss, grads = coupled.gradients(inputs, schedule, added_loss_grad)
        result = Executor(step, timer).train(
            feeds,
            loss=self._loss,
            loss_grad=loss_grad,
            added_loss_grad=added_loss_grad,
            grads=grads,
        )
        if coupled.keys:
            result = dataclasses.replace(
                result, loss=add_losses(coupled_loss, result.loss)
            )
        self._update(result, targets, weights, _first(inputs).shape[0])
        return result

    def evaluate(
        self,
        inputs: Mapping[TensorKey, tf.Tensor],
        targets: Any,
        weights: Any,
        *,
        schedule: Schedule,
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Runs a mini-batch forward, updates metrics, and returns its losses.

        Returns:
            The loss with the sums that layers add, and the means that they add, if any.
        """
        coupled = self._coupled[False]
        cuts = [key.value_id for key in coupled.keys]
        returned = (self._loss.value_id, *self._returned, *cuts)
        step, feeds = self._begin(
            inputs, targets, weights, schedule, returned, training=False
        )
        executor = Executor(step)
        result = executor.forward(feeds)
        outputs = {**step.passed_through(inputs), **result.outputs}
        result = dataclasses.replace(result, outputs=outputs)
        self._update(result, targets, weights, _first(inputs).shape[0])
        loss = tf.reduce_sum(outputs[self._loss])
        summed = executor.summed_loss
        if summed is not None:
            loss += tf.cast(summed, loss.dtype)
        return loss, coupled.with_losses(result).loss

    def _begin(
        self,
        inputs: Mapping[TensorKey, tf.Tensor],
        targets: Any,
        weights: Any,
        schedule: Schedule,
        outputs: tuple[int, ...],
        *,
        training: bool,
    ) -> tuple[Step, dict[TensorKey, tf.Tensor]]:
        """Returns a step that has not run yet, and the tensors to run it on."""
        rows = self._pipeline_inputs(inputs, targets, weights)
        spec = tf.TensorSpec([len(self._reductions)], tf.float64)
        step = self._pipelines[training].begin(
            rows,
            schedule=schedule,
            training=training,
            outputs=outputs,
            per_step={self._denominators: spec},
            differentiable=False,
            evaluates=not training,
        )
        denominators = self._loss_denominators(
            step, inputs, targets, weights, training=training
        )
        return step, {**rows, self._denominators: denominators}

    def _pipeline_inputs(
        self, inputs: Mapping[TensorKey, tf.Tensor], targets: Any, weights: Any
    ) -> dict[TensorKey, tf.Tensor]:
        """Returns the tensors that are split: inputs, targets and weights."""
        named = {"an input": _first(inputs)}
        rows = dict(inputs)
        for name, values, tensors in (
            ("target", self._targets, targets),
            ("sample weights", self._sample_weights, weights),
        ):
            flat = keras.tree.flatten(values), keras.tree.flatten(tensors)
            for number, (value, tensor) in enumerate(zip(*flat, strict=True)):
                if value is not None:
                    rows[TensorKey(value.id)] = tf.convert_to_tensor(tensor)
                    named[f"{name} {number}"] = rows[TensorKey(value.id)]
        input_checks.check_equal_batches(named)
        return rows

    def _loss_denominators(
        self,
        step: Step,
        inputs: Mapping[TensorKey, tf.Tensor],
        targets: Any,
        weights: Any,
        *,
        training: bool,
    ) -> tf.Tensor:
        """Returns the denominators of the losses of a mini-batch, `[n]`.

        Args:
            step: The step, traced: it tells which losses are masked.
            inputs: The inputs of the model, `[B, ...]` each.
            targets: Targets of the mini-batch.
            weights: Sample weights, nested as the targets.
            training: True to run layers as in training.
        """
        masked = step.traced[-1].static_value(self._masked)
        assert masked is not None  # A constant of the trace.
        masks_predictions, masks_values = masked.T
        masks: dict[int, tf.Tensor] = {}
        if any(masks_predictions):
            masks = self._output_masks(inputs, training=training)

        def placeholder(value: Value, like: keras.KerasTensor) -> tf.Tensor:
            """Returns zeros of an output's shape, with the output's mask on them."""
            mask = masks.get(value.id)
            sizes = [1 if n is None else n for n in like.shape]
            sizes[0] = rows
            if mask is not None:
                known = tf.unstack(tf.shape(mask))[: len(sizes)]
                sizes[: len(known)] = known
            zeros = tf.zeros(sizes, like.dtype)
            keras_internals.calls.set_mask(zeros, mask)
            return zeros

        with small_functions.scalars_scope(self._pipeline.strategy.primary_devices[-1]):
            rows = tf.shape(_first(inputs))[0]
            outputs = keras.tree.map_structure(
                placeholder, self._pipeline.captured.output_structure, self._shapes
            )
            return losses.denominators(
                self._compiled,
                self._reductions,
                targets,
                outputs,
                weights,
                masks_values=masks_values,
            )

    def _update(
        self, result: StepResult, targets: Any, weights: Any, batch_size: Any
    ) -> None:
        """Assigns changed variables, and updates full-batch metrics.

        Args:
            result: The result of the step.
            targets: Targets of the mini-batch.
            weights: Sample weights, nested as the targets.
            batch_size: Number of examples, if it is known; Keras weighs mini-batches by
                it in the means of single losses.
        """
        strategy = current_strategy()
        for update in result.updates:
            update.variable.assign(update.value)
        num_replicas = strategy.num_replicas
        if batch_size is not None and num_replicas > 1:
            total = tf.constant(batch_size, self._head.dtype)
            batch_size = strategy.sum_over_replicas(total) / num_replicas
        last = self._pipeline.strategy.primary_devices[-1]
        parts = small_functions.run_on(
            last, _sum_terms, result.outputs[self._loss_terms]
        )
        for tracker, part in zip(self._compiled.loss_trackers, parts, strict=False):
            # The metric adds up what all replicas give it.
            tracker.update_state(part * num_replicas, sample_weight=batch_size)
        if self._full_batch_metrics:
            outputs = self._pipeline.nest_outputs(result.outputs)
            losses.update_metrics(
                self._compiled,
                targets,
                outputs,
                weights,
                lambda n: n in self._full_batch_metrics,
            )


def _sum_terms(terms: tf.Tensor) -> list[tf.Tensor]:
    """Returns the losses of a mini-batch, of those of microbatches `[M, n]`."""
    return tf.unstack(tf.reduce_sum(terms, 0))


def _first(inputs: Mapping[TensorKey, tf.Tensor]) -> tf.Tensor:
    return next(iter(inputs.values()))


def _check_copies(compiled: keras_internals.compiled.CompiledState) -> None:
    """Raises RuntimeError if replicas have no copies of a metric's variables."""
    for metric in compiled.compiled_metrics:
        if any(map(current_strategy().is_on_one_replica, metric.variables)):
            raise RuntimeError(
                "Replicas each add to a copy of a metric's variables. Received "
                f"metric '{metric.name}', whose variables are on one replica "
                "alone. Make it inside `with strategy.scope():`, or give its name."
            )


def _report_coupled(coupled: CoupledLayers) -> None:
    """Warns of the cost of losses of layers that couple examples."""
    if not coupled.keys:
        return
    warnings.warn(
        f"Layer '{coupled.first_name}' adds a loss that couples the examples of a "
        "mini-batch, as one does that balances experts, so a step first runs all "
        "forwards, for what that loss is made of. That takes about a third of a step "
        "more, a quarter with recomputation. `added_losses='microbatch'` takes the "
        "mean of those of the microbatches instead.",
        stacklevel=4,
    )


def _report_full_batch(metrics: Iterable[str], num_replicas: int) -> None:
    """Warns of metrics of the whole mini-batch, or refuses them over replicas."""
    names = ", ".join(map(repr, metrics))
    if names and num_replicas > 1:
        raise ValueError(
            "A metric that mixes the examples of a batch, or whose state is no sum "
            "over them, cannot be taken over replicas, each of which has some. "
            f"Received {names}. Return a value for each example, of which Keras "
            "takes the mean, or leave them out."
        )
    if names:
        warnings.warn(
            "Outputs of the whole mini-batch are kept for metrics that cannot be "
            f"taken of one microbatch after the other. Received {names}, which mix "
            "examples or weigh all batches alike. Leave them out to save that "
            "memory.",
            stacklevel=3,
        )
