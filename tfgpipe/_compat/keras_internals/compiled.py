"""Losses and metrics that a model is compiled with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

from tfgpipe._compat.keras_internals.substitution import substitute
from tfgpipe._compat.tf_internals import eager_variables, without_strategy


@dataclasses.dataclass(frozen=True)
class CompiledState:
    """The losses and metrics that a model was compiled with.

    Attributes:
        losses: Keras' container of losses, or None.
        metrics: Keras' container of metrics, or None.
        tracker: The metric of the total loss.
    """

    losses: Any
    metrics: Any
    tracker: keras.metrics.Metric

    @property
    def num_losses(self) -> int:
        """Number of losses, once they are built."""
        return len(self.losses._flat_losses) if self.losses else 0

    @property
    def loss_trackers(self) -> list[keras.metrics.Metric]:
        """The metrics of the single losses, where there are several."""
        return self.losses.metrics if self.losses else []

    @property
    def compiled_metrics(self) -> list[keras.metrics.Metric]:
        """The metrics, once they are built."""
        return self.metrics.metrics if self.metrics else []

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the metrics."""
        return self.metrics.variables if self.metrics else []


def compiled(model: keras.Model) -> CompiledState:
    """Returns the losses and metrics that a model was compiled with.

    Keras' public methods evaluate all of it at once, on a whole batch.
    """
    return CompiledState(
        model._compile_loss, model._compile_metrics, model._loss_tracker
    )


def state_of_losses(losses: Any, targets: Any, outputs: Any) -> CompiledState:
    """Returns losses as a model has them that is compiled with them, without metrics.

    Args:
        losses: Losses, nested as the outputs.
        targets: Shapes and types of the targets, nested as the outputs.
        outputs: Shapes and types of the outputs.
    """
    with eager_variables():
        container = CompileLoss(losses)
        container.build(targets, outputs)
        return CompiledState(container, None, keras.metrics.Mean("loss"))


def build_compiled(model: keras.Model, data: Any) -> None:
    """Creates the variables of a compiled model, its losses, metrics and optimizer.

    Keras creates them one by one while it traces a step on a whole batch. An error it
    reports as a model that should be called before `fit`, which would raise the same
    one: so the error itself is raised.
    """
    with eager_variables():
        try:
            model._symbolic_build(data_batch=data)
        except RuntimeError as error:
            raise error.__context__ or error from None


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns arguments that compile another model alike, with the same objects.

    Keras' public `get_compile_config` serializes them, which users' functions cannot
    be. The optimizer is the one in use, which may scale the loss where the argument of
    `compile` did not.
    """
    arguments = dict(model._compile_config.config)
    return {**arguments, "optimizer": model.optimizer, "auto_scale_loss": False}


def evaluate_loss(
    compiled: CompiledState,
    evaluate: Callable[[int, keras.Loss, Any, Any, Any], tf.Tensor],
    targets: Any,
    outputs: Any,
    sample_weights: Any,
) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
    """Returns the total loss, and each that is tracked, with each loss replaced.

    Keras alone pairs losses with targets and outputs, whatever their structures. Its
    losses are replaced while it applies them, and it sees no replicas, since it would
    divide means by their number.

    Args:
        compiled: The model's losses.
        evaluate: Replacement of each loss, a function of its index, the loss, and the
            target, output and sample weights that the loss is called with.
        targets: Targets, nested as Keras nests them.
        outputs: Outputs, nested in the same way.
        sample_weights: Sample weights, nested in the same way, or None.
    """
    container = compiled.losses
    if container is None:
        return None, []
    recorders = list[_LossRecorder]()

    def replaced(losses: Any) -> list[Any]:
        return [
            each._replace(loss=functools.partial(evaluate, i, each.loss))
            for i, each in enumerate(losses)
        ]

    def recorded(trackers: Any) -> list[_LossRecorder]:
        recorders.extend(_LossRecorder() for _ in trackers)
        return recorders

    with (
        substitute(
            (container, "_flat_losses", replaced), (container, "_metrics", recorded)
        ),
        without_strategy(),
    ):
        total = container(targets, outputs, sample_weights)
    return total, [each.value for each in recorders if each.value is not None]


class _LossRecorder:
    """Has the place of the metric of a single loss."""

    value: tf.Tensor | None = None

    def update_state(self, value: tf.Tensor, sample_weight: Any = None) -> None:
        del sample_weight
        self.value = value


@dataclasses.dataclass(frozen=True)
class MetricTerm:
    """A compiled metric, and what it is updated with."""

    metric: keras.metrics.Metric
    target: Any
    output: Any
    weight: Any


def metric_terms(
    compiled: CompiledState, targets: Any, outputs: Any, sample_weights: Any
) -> list[MetricTerm]:
    """Returns each compiled metric with its target, output and sample weights.

    Keras' container updates all of them or none.
    """
    container = compiled.metrics
    if container is None:
        return []
    y, p = container._flatten_y(targets), container._flatten_y(outputs)
    w = [None] if sample_weights is None else container._flatten_y(sample_weights)
    w = w * len(y) if len(w) < len(y) else w
    none = [None] * len(y)
    return [
        MetricTerm(metric, *terms)
        for some, weighing in (
            (container._flat_metrics, none),
            (container._flat_weighted_metrics, w),
        )
        for metrics, *terms in zip(some, y, p, weighing, strict=False)
        for metric in (metrics.metrics if metrics else ())
    ]


def preferred_direction(
    metric: keras.metrics.Metric,
) -> Literal["lower", "higher"] | None:
    """Returns the direction in which a metric improves, None where Keras has none.

    Keras' own callbacks use this; there is no public path to it.
    """
    direction = getattr(metric, "_direction", None)
    if direction == "up":
        return "higher"
    return "lower" if direction == "down" else None
