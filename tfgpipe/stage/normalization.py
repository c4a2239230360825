"""Deferred batch normalization: moving averages are updated once per step.

In a pipeline each microbatch is normalised with its own moments, so that none waits for
another. The moving averages are for evaluation, which knows no microbatches: they
should move as they would have without a pipeline, by the moments of the mini-batch
(GPipe, Huang et al. 2019, section 2.2; torchgpipe's `DeferredBatchNorm`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import first_names, unique
from tfgpipe.capture import TracingScope
from tfgpipe.stage.batch_moments import BatchMoments

BatchNorm = Literal["microbatch", "deferred"]


@keras.saving.register_keras_serializable(
    package="tfgpipe", name="DeferredBatchNormalization"
)
class BatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization whose moving averages see whole mini-batches in a pipeline.

    Arguments, configuration, weights and files of weights are those of
    `keras.layers.BatchNormalization`, and so is what it computes outside a pipeline.
    In one, each microbatch is normalised with its own mean and variance, as by Keras'
    layer, but the moving averages move once a step, by the mean and variance of the
    whole mini-batch: the same as without the pipeline, for any number of microbatches.
    A layer that is called several times in a step moves them once for each call, in the
    order of the calls, as it does without a pipeline.

    `PipelinedLayer(..., batch_norm="deferred")` has Keras' own layers do the same.

    Args:
        *args: As in `keras.layers.BatchNormalization`.
        **kwargs: As in `keras.layers.BatchNormalization`.

    Input shape:
        As of `keras.layers.BatchNormalization`.

    Output shape:
        The same as the input shape.

    Example:

    >>> norm = tfgpipe.layers.DeferredBatchNormalization(momentum=0.9)
    >>> layers = [norm, keras.layers.Dense(1)]
    >>> pipelined = tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=4)
    >>> _ = pipelined(np.arange(8.0)[:, None], training=True)
    >>> round(float(norm.moving_mean[0]), 6)  # 0.9 * 0 + 0.1 * 3.5
    0.35

    Raises:
        ValueError: If it is built with `renorm=True`.
    """

    config_is_complete = True

    def build(self, input_shape: Any) -> None:
        """Creates the weights.

        Raises:
            ValueError: With `renorm=True`.
        """
        if _renormalises(self):
            raise ValueError(
                "Batch renormalization corrects each batch by averages of those before "
                "it, which cannot wait for the end of the step. Layer "
                f"'{self.name}' of type DeferredBatchNormalization received "
                "renorm=True. Use `keras.layers.BatchNormalization(renorm=True)`, "
                "whose averages move once a microbatch, or leave `renorm` out."
            )
        super().build(input_shape)

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: Any = None
    ) -> tf.Tensor:
        """Normalises the inputs.

        Args:
            inputs: The tensor to normalise.
            training: True to normalise by their own moments, False by the moving
                averages.
            mask: Mask of the positions that count, of one dimension less than the
                inputs.
        """
        scope = keras_internals.calls.current_stateless_scope()
        if not (isinstance(scope, TracingScope) and training and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        moments = BatchMoments(
            tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32")),
            mask,
            axis=self.axis,
            variables=(self.moving_mean, self.moving_variance),
            momentum=self.momentum,
            replicas=scope.replicas if self.synchronized else None,
        )
        # Keras' layer normalises with these in place of the moving averages.
        before = [(v, scope.get_current_value(v)) for v in moments.variables]
        scope.substitute(
            [
                (self.moving_mean, moments.mean),
                (self.moving_variance, moments.variance),
            ]
        )
        outputs = super().call(inputs, training=False, mask=mask)
        scope.substitute(before)
        self._update_averages(moments, scope)
        return outputs

    def _update_averages(self, moments: BatchMoments, scope: TracingScope) -> None:
        """Defers the update of the moving averages to the end of the step."""
        scope.accumulators.append(moments)


class _SynchronizedBatchNormalization(BatchNormalization):
    """Keras' layer with `synchronized=True`, whose own collectives fail in a stage.

    In a traced stage `tf.distribute` does not sum over replicas, not even over one.
    """

    def _update_averages(self, moments: BatchMoments, scope: TracingScope) -> None:
        """Updates the moving averages with each microbatch."""
        before = [scope.get_current_value(v) for v in moments.variables]
        after = moments.update(moments.values, before)
        for update in zip(moments.variables, after, strict=True):
            scope.add_update(update)
        if moments.over_replicas:
            scope.over_replicas.extend(moments.variables)


# Keras names groups in files of weights after classes. The class has the name of Keras'
# own, so that the plain layer finds them, and the other way round.
DeferredBatchNormalization = BatchNormalization


@contextlib.contextmanager
def deferred_batch_norms(
    layers: Iterable[Any], batch_norm: BatchNorm
) -> Iterator[None]:
    """Has Keras' batch normalizations in layers do as pipelines need, for a while.

    However deep they are: Keras has no hook at calls inside a layer.
    """

    def class_of(norm: Any) -> type:
        if isinstance(norm, BatchNormalization) or not can_defer(norm):
            return type(norm)
        if batch_norm == "deferred":
            return BatchNormalization
        return _SynchronizedBatchNormalization if norm.synchronized else type(norm)

    with keras_internals.substitution.as_subclasses(batch_norms(layers), class_of):
        yield


def batch_norms(layers: Iterable[Any]) -> list[keras.layers.BatchNormalization]:
    """Returns the batch normalizations among layers and inside them, each once."""
    inner = unique(
        x for layer in layers for x in keras_internals.layers.inner_layers(layer)
    )
    return [x for x in inner if isinstance(x, keras.layers.BatchNormalization)]


def any_synchronized(layers: Iterable[Any]) -> bool:
    """Returns whether a batch normalization synchronizes moments over replicas."""
    return any(norm.synchronized and norm.trainable for norm in batch_norms(layers))


def can_defer(norm: keras.layers.BatchNormalization) -> bool:
    """Returns whether a layer is deferred, or can be converted."""
    if isinstance(norm, BatchNormalization):
        return True
    return type(norm) is keras.layers.BatchNormalization and not _renormalises(norm)


def _renormalises(norm: keras.layers.BatchNormalization) -> bool:
    return bool(norm.get_config().get("renorm"))  # Younger than the oldest Keras here.


def warn_of_batch_norm(calls: Iterable[Any], batch_norm: str) -> None:
    """Warns of moving averages that would be updated once per microbatch."""
    norms = [norm for norm in batch_norms(calls) if norm.trainable]
    moved = [x for x in norms if not isinstance(x, BatchNormalization)]
    if batch_norm == "deferred":
        moved = [norm for norm in moved if not can_defer(norm)]
        way_out = (
            "These renormalise, or have a class of their own, which cannot be made to "
            "wait: let the class inherit from "
            "`tfgpipe.layers.DeferredBatchNormalization`, use "
        )
    else:
        way_out = 'Try `batch_norm="deferred"` for the averages, '
    if not moved:
        return
    warnings.warn(
        "Batch normalization sees one microbatch at a time in a pipeline: each is "
        "normalised on its own, and the moving averages move once for each, so that "
        "evaluation differs from that of the unpipelined model. Received "
        f"{len(moved)} such layers: {first_names([x.name for x in moved])}. {way_out}"
        "`num_microbatches=1` for everything, or GroupNormalization or "
        "LayerNormalization, which know no batch.",
        stacklevel=2,
    )


def check_synchronized(calls: Iterable[Any]) -> None:
    """Raises ValueError for a layer that needs collectives and cannot have them."""
    for norm in batch_norms(calls):
        if norm.synchronized and norm.trainable and not can_defer(norm):
            raise ValueError(
                "Keras sums over replicas only outside a pipeline; inside, tfgpipe "
                "does, for Keras' own layer. Received "
                f"'{norm.name}' of type {type(norm).__name__} with synchronized=True, "
                "which renormalises or has a class of its own. Let the class inherit "
                "from `tfgpipe.layers.DeferredBatchNormalization`, or leave "
                "`synchronized` out."
            )
