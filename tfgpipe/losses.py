"""The loss and the metrics of a mini-batch, from its microbatches.

A Keras loss is a mean over what counts: rows, entries that are not masked, sample
weights. Of a microbatch Keras takes the mean over what counts there, so microbatches
weigh in by their *extent*, how much of what counts in the mini-batch they hold:

    loss = sum over m of  extent[m] / extent  *  loss[m]

The extent of the mini-batch must be known before the first backward, which may come
before the last forward. It depends on targets, sample weights and masks, but not on
predictions.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import seams
from tfgpipe.seams import Compiled

# Whether a loss gives a value for each row, or of all rows the mean or the sum.
Kind = Literal["values", "mean", "sum"]

# Rows to try losses and metrics on, and of these the first part.
_ROWS, _FIRST = 6, 4


class Head:
    """The last call of the last stage: the loss of a microbatch, and its metrics.

    Args:
        compiled: The model's losses and metrics.
        kinds: The kind of each loss.
        whole: Positions of metrics to leave out, as they need the whole mini-batch.

    Attributes:
        masks_predictions: For each loss, whether its predictions have had a mask.
        masks_values: For each loss, whether it has masked values itself.
        dtype: The type of the loss.
    """

    name = "loss"

    def __init__(
        self, compiled: Compiled, kinds: Sequence[Kind], whole: Collection[int] = ()
    ) -> None:
        self._compiled = compiled
        self._kinds = kinds
        self._whole = whole
        self.masks_predictions = [False] * len(kinds)
        self.masks_values = [False] * len(kinds)
        container = compiled.losses
        self.dtype = container.dtype if container else keras.config.floatx()

    def __call__(
        self, targets: Any, outputs: Any, weights: Any, extents: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the microbatch's part in the loss `[1]`, and in each loss `[1, n]`.

        Args:
            targets: Nested as Keras nests them.
            outputs: Likewise.
            weights: Sample weights, likewise, or None.
            extents: Rows that all hold the extents of the mini-batch, one a loss.
        """
        rows = tf.shape(extents)[0]

        def part(number: int, loss: keras.Loss, y: Any, p: Any, w: Any) -> tf.Tensor:
            if w is not None and self._kinds[number] != "values":
                raise ValueError(
                    "Sample weights weigh the rows of a loss. Received some for loss "
                    f"'{loss.name}', which returns one number for all rows. Return a "
                    "value for each row."
                )
            given = seams.get_mask(p)
            own = seams.get_mask(values_of(loss, y, p))
            self.masks_predictions[number] |= given is not None
            self.masks_values[number] |= own is not None
            mine = extent(loss, self._kinds[number], [given, own], w, rows)
            mean = loss(y, p, w)
            share = tf.math.divide_no_nan(mine, extents[0, number])
            return mean * tf.cast(share, mean.dtype)

        total, parts = seams.evaluate_loss(
            self._compiled, part, targets, outputs, weights
        )
        update_metrics(
            self._compiled, targets, outputs, weights, lambda n: n not in self._whole
        )
        # They are for looking at; the gradient goes through the total.
        seen = [tf.stop_gradient(tf.cast(x, self.dtype)) for x in parts]
        return [
            tf.zeros([1], self.dtype) if total is None else total[None],
            tf.stack(seen)[None] if seen else tf.zeros([1, 0], self.dtype),
        ]


def extent(
    loss: keras.Loss,
    kind: Kind,
    masks: Sequence[tf.Tensor | None],
    weights: tf.Tensor | None,
    rows: tf.Tensor,
) -> tf.Tensor:
    """Returns how much of what a loss is a mean over some rows hold, `[]`.

    Args:
        loss: The loss.
        kind: What it gives.
        masks: Masks that tell what counts, or None.
        weights: Sample weights, or None.
        rows: Number of rows.
    """
    if kind == "sum" or (kind == "values" and loss.reduction == "sum"):
        return tf.ones([], tf.float64)
    if kind == "mean":
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


def extents(
    compiled: Compiled,
    kinds: Sequence[Kind],
    targets: Any,
    outputs: Any,
    weights: Any,
    *,
    masks_values: Sequence[bool],
) -> tf.Tensor:
    """Returns the extents of a mini-batch, one for each loss, `[n]`.

    Args:
        compiled: The model's losses.
        kinds: The kind of each loss.
        targets: Nested as Keras nests them.
        outputs: Tensors of the outputs' shapes, whatever their values, with the masks
            that are on them.
        weights: Sample weights, or None.
        masks_values: For each loss, whether it masks values itself.
    """
    found: dict[int, tf.Tensor] = {}
    rows = tf.shape(keras.tree.flatten(outputs)[0])[0]

    def measure(number: int, loss: keras.Loss, y: Any, p: Any, w: Any) -> tf.Tensor:
        own = seams.get_mask(values_of(loss, y, p)) if masks_values[number] else None
        masks = [seams.get_mask(p), own]
        found[number] = extent(loss, kinds[number], masks, w, rows)
        return tf.zeros([])

    seams.evaluate_loss(compiled, measure, targets, outputs, weights)
    one = tf.ones([], tf.float64)  # Keras leaves some losses of a list unused.
    return tf.stack([found.get(number, one) for number in range(len(kinds))])


def update_metrics(
    compiled: Compiled,
    targets: Any,
    outputs: Any,
    weights: Any,
    chosen: Callable[[int], bool],
) -> None:
    """Updates the metrics whose position is chosen."""
    terms = seams.metric_terms(compiled, targets, outputs, weights)
    for number, term in enumerate(terms):
        if chosen(number):
            term.metric.update_state(term.target, term.output, term.weight)


def values_of(loss: keras.Loss, target: Any, output: Any) -> tf.Tensor:
    """Returns the values of a loss before they are reduced."""
    if type(loss).__call__ is not keras.Loss.__call__:
        return loss(target, output)

    def converted(x: Any) -> tf.Tensor:
        return keras.ops.convert_to_tensor(x, dtype=loss.dtype)

    return loss.call(*keras.tree.map_structure(converted, (target, output)))


def kinds_of(compiled: Compiled, targets: Any, outputs: Any) -> list[Kind]:
    """Returns the kind of each loss, found by trying it on noise.

    Args:
        compiled: The model's losses.
        targets: Shapes and types of the targets, nested as Keras nests them.
        outputs: Likewise of the outputs.

    Raises:
        ValueError: If a loss mixes the rows of a batch, or does not reduce its values.
    """
    found: list[Kind] = ["values"] * compiled.num_losses

    def examine(number: int, loss: keras.Loss, y: Any, p: Any, w: Any) -> tf.Tensor:
        del w
        if loss.reduction in (None, "none"):
            raise ValueError(
                "The loss of a mini-batch is the sum of its microbatches' parts. "
                f"Received loss '{loss.name}' with reduction=None, which gives no "
                'number. Use reduction="sum_over_batch_size" or "sum".'
            )
        with contextlib.suppress(tf.errors.OpError):
            found[number] = _kind(loss, y, p)
        return tf.zeros([])

    with tf.init_scope():
        seams.evaluate_loss(compiled, examine, targets, outputs, None)
    return found


def metrics_of_the_whole(
    compiled: Compiled, targets: Any, outputs: Any
) -> dict[int, str]:
    """Returns positions and names of metrics that need the whole mini-batch.

    Those whose state after two updates with parts of a batch is not that after one with
    all of it, as of correlations over the batch, or means that weigh batches equally.

    Args:
        compiled: The model's metrics.
        targets: Shapes and types of the targets, nested as Keras nests them.
        outputs: Likewise of the outputs.
    """
    found = {}
    with tf.init_scope():
        terms = seams.metric_terms(compiled, targets, outputs, None)
        for number, term in enumerate(terms):
            with contextlib.suppress(tf.errors.OpError):
                if _needs_the_whole(term):
                    found[number] = term.metric.name
    return found


def _kind(loss: keras.Loss, target: Any, output: Any) -> Kind:
    trials = [
        [np.asarray(values_of(loss, *rows)) for rows in _trial(target, output, padded)]
        for padded in (False, True)
    ]
    for kind, holds in _KINDS.items():
        if all(holds(*values) for values in trials):
            return kind
    raise ValueError(
        "A pipeline that owns its loss takes it of one microbatch at a time. Received "
        f"loss '{loss.name}', which mixes the rows of a batch: of {_ROWS} rows it "
        "gives neither the values, nor the mean, nor the sum of what it gives of "
        f"{_FIRST} and of {_ROWS - _FIRST} of them. Use `tfgpipe.PipelinedLayer` in a "
        "model of your own, whose outputs are whole."
    )


def _needs_the_whole(term: seams.MetricTerm) -> bool:
    metric = term.metric
    clean = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
    for padded in (False, True):
        whole, first, rest = _trial(term.target, term.output, padded)
        once = metric.stateless_update_state(clean, *whole)
        twice = metric.stateless_update_state(clean, *first)
        twice = metric.stateless_update_state(twice, *rest)
        if not all(_close(a, b) for a, b in zip(once, twice, strict=True)):
            return True
    return False


def _trial(targets: Any, outputs: Any, padded: bool) -> list[tuple[Any, Any]]:
    """Returns rows to try a loss or a metric on: all of them, the first, the rest.

    Floats are noise between 0 and 1, and integers 1. Targets and outputs go together
    place by place, so a size that is not known of one is that of the other.

    Args:
        targets: Shapes and types of the targets, in any structure.
        outputs: Likewise of the outputs.
        padded: Whether some rows of the targets, unevenly spread, are zero.
    """
    specs = [x for x in keras.tree.flatten((targets, outputs)) if x is not None]
    known = {i: n for x in specs for i, n in enumerate(x.shape) if n is not None}
    seeds = itertools.count()

    def rows(spec: Any) -> tf.Tensor | None:
        if spec is None:
            return None
        sizes = [known.get(i, 3) if n is None else n for i, n in enumerate(spec.shape)]
        shape, dtype = [_ROWS, *sizes[1:]], tf.as_dtype(spec.dtype)
        if not dtype.is_floating:
            return tf.ones(shape, dtype)
        noise = tf.random.stateless_uniform(shape, seed=[next(seeds), 0])
        return tf.cast(noise, dtype)

    def with_padding(tensor: tf.Tensor | None) -> tf.Tensor | None:
        if tensor is None or not padded:
            return tensor
        gone = tf.zeros_like(tensor[:1])
        return tf.concat([tensor[:2], gone, tensor[3:4], gone, tensor[5:]], axis=0)

    targets, outputs = keras.tree.map_structure(rows, (targets, outputs))
    both = keras.tree.map_structure(with_padding, targets), outputs
    return [
        keras.tree.map_structure(lambda x, s=some: None if x is None else x[s], both)
        for some in (slice(None), slice(_FIRST), slice(_FIRST, None))
    ]


def _are_values(whole: np.ndarray, first: np.ndarray, rest: np.ndarray) -> bool:
    sizes = [x.shape[:1] for x in (whole, first, rest)]
    each = sizes == [(_ROWS,), (_FIRST,), (_ROWS - _FIRST,)]
    return each and _close(whole, np.concatenate([first, rest]))


def _is_mean(whole: np.ndarray, first: np.ndarray, rest: np.ndarray) -> bool:
    share = _FIRST / _ROWS
    alike = whole.shape == first.shape == rest.shape
    return alike and _close(whole, share * first + (1 - share) * rest)


def _is_sum(whole: np.ndarray, first: np.ndarray, rest: np.ndarray) -> bool:
    alike = whole.shape == first.shape == rest.shape
    return alike and _close(whole, first + rest)


def _close(a: Any, b: Any) -> bool:
    return np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


# How to tell, from what a loss gives of all rows, of the first and of the rest.
_KINDS: dict[Kind, Callable[..., bool]] = {
    "values": _are_values,
    "mean": _is_mean,
    "sum": _is_sum,
}
