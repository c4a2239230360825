"""Losses that couple the examples of a mini-batch, exact under every schedule.

A contrastive loss, such as that of CLIP (Radford et al. 2021, figure 3) or SimCLR (Chen
et al. 2020, equation 1), is of all examples together, where a pipeline sees those of a
microbatch. So a step has two sweeps. In the first, forwards alone give the outputs of
the whole mini-batch, of which the loss and its gradient are taken. The second is a step
as any other, by whatever schedule, whose last stage has that gradient for a target:

    sweep 1   forwards ─▶ outputs [B, ...] ─▶ loss ─▶ its gradient by outputs, g
    sweep 2   forwards and backwards of the loss  sum(g * (outputs - constant)), 0

Both begin with the same weights, statistics and seeds, so that they have the same
outputs, and only the second changes statistics. It costs one forward more.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.capture import TensorKey
from tfgpipe.distribution import current_strategy
from tfgpipe.runtime import loss_probes, losses
from tfgpipe.runtime.coupled_layers import coupled_layers
from tfgpipe.runtime.executor import Executor, StepResult, TrainStepResult
from tfgpipe.runtime.loss_pipeline import LossPipeline
from tfgpipe.runtime.pipeline import Pipeline
from tfgpipe.runtime.timer import StepTimer
from tfgpipe.schedules import Schedule


def make_loss_pipeline(
    pipeline: Pipeline,
    compiled: keras_internals.compiled.CompiledState,
    targets: Any,
    sample_weights: Any,
) -> LossPipeline | CoupledLossPipeline:
    """Returns the pipeline that ends in the loss, for losses of any kind.

    Args:
        pipeline: The model, in stages.
        compiled: Its losses and metrics, built.
        targets: The targets it is made for: tensors, nested as Keras nests them.
        sample_weights: The sample weights that it is made for, or None.

    Raises:
        ValueError: If a loss couples examples and there are replicas, or if one does
            not reduce its values.
    """
    try:
        return LossPipeline(pipeline, compiled, targets, sample_weights)
    except loss_probes.CoupledLossError as error:
        if current_strategy().num_replicas > 1:
            raise
        warnings.warn(
            f"Loss '{error.loss}' couples the examples of a mini-batch, so a step "
            "first runs all forwards, for the outputs of the whole mini-batch. That "
            "takes about a third of a step more, a quarter with recomputation, and the "
            "memory of the outputs.",
            stacklevel=4,
        )
        return CoupledLossPipeline(pipeline, compiled)


class CoupledLossPipeline:
    """The stages of a model, trained by the gradient of a loss by their outputs.

    Args:
        pipeline: The model, in stages.
        compiled: Its losses and metrics, built.
    """

    def __init__(
        self, pipeline: Pipeline, compiled: keras_internals.compiled.CompiledState
    ) -> None:
        self._pipeline, self._compiled = pipeline, compiled
        captured = pipeline.captured
        outputs = keras.tree.map_structure(
            lambda value: captured.specs[value.id], captured.output_structure
        )
        given = keras.tree.map_structure(lambda _: _GivenGradient(), outputs)
        gradients = keras.tree.map_structure(_gradient_spec, outputs)
        state = keras_internals.compiled.state_of_losses(given, gradients, outputs)
        # That they are sums no probe can tell, as they are zero.
        self._second_sweep = LossPipeline(
            pipeline, state, gradients, None, reductions=["sum"] * state.num_losses
        )

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
        """Runs a mini-batch twice, and updates metrics.

        Args:
            inputs: The inputs of the model, `[B, ...]` each.
            targets: Targets, nested as Keras nests them.
            weights: Sample weights, nested as the targets.
            schedule: The order of the actions.
            loss_grad: The gradient of the loss.
            timer: Times the actions of the second sweep, if given.
        """
        outputs, _, _ = self._outputs(inputs, schedule, training=True)
        with self._on_last_device(), tf.GradientTape() as tape:
            flat = [x for x in keras.tree.flatten(outputs) if x.dtype.is_floating]
            tape.watch(flat)
            total, parts = self._of_mini_batch(targets, outputs, weights)
        with self._on_last_device():
            # A loss of no output has the gradient zero.
            found = tape.gradient(
                total, outputs, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            gradients = keras.tree.map_structure(_as_gradient, found, outputs)
        result = self._second_sweep.train(
            inputs,
            gradients,
            None,
            schedule=schedule,
            loss_grad=loss_grad,
            timer=timer,
        )
        self._update(targets, outputs, weights, parts)
        # What the second sweep has computed is zero, and losses that layers add.
        loss = result.compiled_loss + tf.cast(total, result.compiled_loss.dtype)
        return dataclasses.replace(result, compiled_loss=loss)

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
        outputs, result, summed = self._outputs(inputs, schedule, training=False)
        for update in result.updates:
            update.variable.assign(update.value)
        with self._on_last_device():
            total, parts = self._of_mini_batch(targets, outputs, weights)
        self._update(targets, outputs, weights, parts)
        if summed is not None:
            total += tf.cast(summed, total.dtype)
        return total, result.loss

    def _on_last_device(self) -> Any:
        return tf.device(self._pipeline.strategy.primary_devices[-1])

    def _outputs(
        self,
        inputs: Mapping[TensorKey, tf.Tensor],
        schedule: Schedule,
        *,
        training: bool,
    ) -> tuple[Any, StepResult, tf.Tensor | None]:
        """Returns the outputs of the mini-batch, what else forwards give, and sums."""
        coupled = coupled_layers(self._pipeline, training=training)
        step = coupled.pipeline.begin(
            inputs,
            schedule=schedule,
            training=training,
            differentiable=False,
            evaluates=True,
        )
        executor = Executor(step)
        result = coupled.with_losses(executor.forward(inputs))
        found = {**step.passed_through(inputs), **result.outputs}
        outputs = self._pipeline.nest_outputs(found)
        with self._on_last_device():
            outputs = keras.tree.map_structure(_in_full_precision, outputs)
        return outputs, result, executor.summed_loss

    def _of_mini_batch(
        self, targets: Any, outputs: Any, weights: Any
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns the loss of the mini-batch, and each that is tracked."""

        def evaluate(_: int, loss: keras.Loss, y: Any, p: Any, w: Any) -> tf.Tensor:
            return loss(y, p, w)

        total, parts = keras_internals.compiled.evaluate_loss(
            self._compiled, evaluate, targets, outputs, weights
        )
        assert total is not None  # There is a loss that couples examples.
        return total, parts

    def _update(
        self, targets: Any, outputs: Any, weights: Any, parts: list[tf.Tensor]
    ) -> None:
        """Updates all metrics with the mini-batch."""
        rows = tf.shape(keras.tree.flatten(outputs)[0])[0]
        for tracker, part in zip(self._compiled.loss_trackers, parts, strict=False):
            tracker.update_state(part, sample_weight=rows)
        losses.update_metrics(self._compiled, targets, outputs, weights, lambda _: True)


class _GivenGradient(keras.Loss):
    """A loss that is zero, and whose gradient by an output is its target."""

    def __init__(self) -> None:
        super().__init__(name="given_gradient", reduction="sum")

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Returns the loss; masks count in what the gradient was taken of."""
        del sample_weight
        y_pred = tf.cast(y_pred, y_true.dtype)
        return tf.reduce_sum(y_true * (y_pred - tf.stop_gradient(y_pred)))


def _gradient_spec(output: keras.KerasTensor) -> keras.KerasTensor:
    """Returns the shape and type of the gradient by an output."""
    is_wide = output.dtype == "float64"
    return keras.KerasTensor(output.shape, "float64" if is_wide else "float32")


def _in_full_precision(output: tf.Tensor) -> tf.Tensor:
    """Returns an output in float32 at least, with its mask, if it is of floats."""
    if not output.dtype.is_floating or output.dtype.size >= 4:
        return output
    wide = tf.cast(output, tf.float32)
    keras_internals.calls.set_mask(wide, keras_internals.calls.get_mask(output))
    return wide


def _as_gradient(gradient: tf.Tensor | None, output: tf.Tensor) -> tf.Tensor:
    """Returns a gradient, zeros by an output that has none, such as of integers."""
    if gradient is None or not gradient.dtype.is_floating:
        return tf.zeros(tf.shape(output), tf.float32)
    return tf.convert_to_tensor(gradient)
