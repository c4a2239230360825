"""The loss and the metrics of a mini-batch, from its microbatches.

A Keras loss is a mean over examples, unmasked entries or sample weights. For a
microbatch Keras takes the mean over that microbatch, so microbatches are weighted by
their *denominator*, how many examples, entries or weights they have:

    loss = sum over m of  denominator[m] / denominator  *  loss[m]

The denominator of the mini-batch must be known before the first backward, which may
come before the last forward. It depends on targets, sample weights and masks, but not
on predictions. Replicas share one mini-batch, so it is the sum over theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.distribution import current_strategy
from tfgpipe.runtime.loss_probes import Reduction, unreduced_values


class LossHead:
    """The last call of the last stage: the loss of a microbatch, and its metrics.

    Args:
        compiled: The model's losses and metrics.
        reductions: The reduction of each loss.
        full_batch_metrics: Positions of full-batch metrics, which are left out.

    Attributes:
        dtype: The type of the loss.
    """

    name = "loss"

    def __init__(
        self,
        compiled: keras_internals.compiled.CompiledState,
        reductions: Sequence[Reduction],
        full_batch_metrics: Collection[int] = (),
    ) -> None:
        self._compiled = compiled
        self._reductions = reductions
        self._full_batch_metrics = full_batch_metrics
        container = compiled.losses
        self.dtype = container.dtype if container else keras.config.floatx()

    def __call__(
        self, targets: Any, outputs: Any, weights: Any, denominators: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the microbatch's term of the loss `[1]`, and of each loss `[1, n]`.

        And which losses are masked, `[n, 2]`: whether their predictions have a mask,
        and whether they mask values themselves. These are constants of the trace.

        Args:
            targets: Nested as Keras nests them.
            outputs: The outputs, nested in the same way.
            weights: Sample weights, nested in the same way, or None.
            denominators: Denominators of the mini-batch, one a loss, `[n]`.
        """
        rows = tf.shape(keras.tree.flatten(outputs)[0])[0]
        masked = [(False, False)] * len(self._reductions)

        def term(index: int, loss: keras.Loss, y: Any, p: Any, w: Any) -> tf.Tensor:
            if w is not None and self._reductions[index] != "values":
                raise ValueError(
                    "Sample weights weigh the examples of a loss. Received some for "
                    f"loss '{loss.name}', which returns one number for all. Return a "
                    "value for each example."
                )
            given = keras_internals.calls.get_mask(p)
            own = keras_internals.calls.get_mask(unreduced_values(loss, y, p))
            masked[index] = given is not None, own is not None
            size = denominator(loss, self._reductions[index], [given, own], w, rows)
            mean = loss(y, p, w)
            weight = tf.math.divide_no_nan(size, denominators[index])
            return mean * tf.cast(weight, mean.dtype)

        total, parts = keras_internals.compiled.evaluate_loss(
            self._compiled, term, targets, outputs, weights
        )
        update_metrics(
            self._compiled,
            targets,
            outputs,
            weights,
            lambda n: n not in self._full_batch_metrics,
        )
        # They are for display; the gradient goes through the total.
        seen = [tf.stop_gradient(tf.cast(x, self.dtype)) for x in parts]
        return [
            tf.zeros([1], self.dtype) if total is None else total[None],
            tf.stack(seen)[None] if seen else tf.zeros([1, 0], self.dtype),
            tf.constant(np.reshape(np.array(masked, bool), [-1, 2])),
        ]


def denominator(
    loss: keras.Loss,
    reduction: Reduction,
    masks: Sequence[tf.Tensor | None],
    weights: tf.Tensor | None,
    rows: tf.Tensor,
) -> tf.Tensor:
    """Returns the loss denominator of some rows, `[]`: what the mean divides by.

    Args:
        loss: The loss.
        reduction: Its reduction: values, mean or sum.
        masks: Masks that tell what counts, or None.
        weights: Sample weights, or None.
        rows: Number of rows.
    """
    if _is_sum(loss, reduction):
        return tf.ones([], tf.float64)
    if reduction == "mean":
        return tf.cast(rows, tf.float64)
    counted: tf.Tensor | None = None
    for mask in masks:
        if mask is not None:
            mask = tf.cast(mask, tf.float64)
            counted = mask if counted is None else counted * mask
    if loss.reduction == "mean_with_sample_weight" and weights is not None:
        weights = tf.cast(weights, tf.float64)
        if counted is None:
            counted = weights
        elif len(weights.shape) > len(counted.shape):
            counted = counted * tf.squeeze(weights, -1)
        elif len(weights.shape) < len(counted.shape):
            counted = counted * tf.expand_dims(weights, -1)
        else:
            counted = counted * weights
    return tf.cast(rows, tf.float64) if counted is None else tf.reduce_sum(counted)


def _is_sum(loss: keras.Loss, reduction: Reduction) -> bool:
    return reduction == "sum" or (reduction == "values" and loss.reduction == "sum")


def denominators(
    compiled: keras_internals.compiled.CompiledState,
    reductions: Sequence[Reduction],
    targets: Any,
    outputs: Any,
    weights: Any,
    *,
    masks_values: Sequence[bool],
) -> tf.Tensor:
    """Returns the denominators of a mini-batch's losses, on all replicas, `[n]`.

    Args:
        compiled: The model's losses.
        reductions: The reduction of each loss.
        targets: Nested as Keras nests them.
        outputs: Tensors of the outputs' shapes, whatever their values, with the masks
            that are on them.
        weights: Sample weights, or None.
        masks_values: For each loss, whether it masks values itself.
    """
    found: dict[int, tf.Tensor] = {}
    are_sums = [False] * len(reductions)
    rows = tf.shape(keras.tree.flatten(outputs)[0])[0]

    def measure(index: int, loss: keras.Loss, y: Any, p: Any, w: Any) -> tf.Tensor:
        own = (
            keras_internals.calls.get_mask(unreduced_values(loss, y, p))
            if masks_values[index]
            else None
        )
        masks = [keras_internals.calls.get_mask(p), own]
        found[index] = denominator(loss, reductions[index], masks, w, rows)
        are_sums[index] = _is_sum(loss, reductions[index])
        return tf.zeros([])

    keras_internals.compiled.evaluate_loss(compiled, measure, targets, outputs, weights)
    one = tf.ones([], tf.float64)  # Keras leaves some losses of a list unused.
    mine = tf.stack([found.get(number, one) for number in range(len(reductions))])
    return tf.where(are_sums, mine, current_strategy().sum_over_replicas(mine))


def update_metrics(
    compiled: keras_internals.compiled.CompiledState,
    targets: Any,
    outputs: Any,
    weights: Any,
    selected: Callable[[int], bool],
) -> None:
    """Updates the metrics whose position is chosen."""
    terms = keras_internals.compiled.metric_terms(compiled, targets, outputs, weights)
    for number, term in enumerate(terms):
        if selected(number):
            term.metric.update_state(term.target, term.output, term.weight)
