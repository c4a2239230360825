"""The loss of a mini-batch, put together of its microbatches', without a pipeline."""

from __future__ import annotations

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import compare, pairwise
from tests.helpers.custom_losses import (
    KINDS,
    Loss,
    built,
    compiled,
    double,
    specs,
    squares,
    squares_of_rows,
    sum_of_squares,
)
from tfgpipe._compat import keras_internals
from tfgpipe.runtime import loss_probes, losses

pytestmark = pytest.mark.usefixtures("double_precision")

ROWS, PLACES, CLASSES = 11, 4, 5
SIZES = {
    "equal but for one": (4, 4, 3),
    "unequal": (1, 6, 4),
    "one of nothing": (2, 9, 0),
}


def cut(structure, sizes):
    """Cuts tensors, with the masks on them, into microbatches."""

    def rows(tensor, some):
        if tensor is None:
            return None
        piece, mask = tensor[some], keras_internals.calls.get_mask(tensor)
        if mask is not None:
            keras_internals.calls.set_mask(piece, mask[some])
        return piece

    ends = list(itertools.accumulate(sizes))
    for some in map(slice, [0, *ends], ends):
        yield keras.tree.map_structure(functools.partial(rows, some=some), structure)


def in_microbatches(of, targets, outputs, weights, sizes):
    """Returns the total, and each loss that is tracked, as a pipeline takes them."""
    kinds = loss_probes.probe_reductions(of, specs(targets), specs(outputs))
    head = losses.LossHead(of, kinds)
    given = (targets, outputs, weights)
    zeros = tf.zeros([len(kinds)], tf.float64)
    masked = head(*next(cut(given, sizes)), zeros)[2]
    found = losses.denominators(of, kinds, *given, masks_values=masked[:, 1])
    parts = [
        head(*piece, found)
        for piece, size in zip(cut(given, sizes), sizes, strict=True)
        if size
    ]
    total = sum(part[0] for part in parts)
    return total[0].numpy(), sum(part[1] for part in parts)[0].numpy()


def assert_same(of, targets, outputs, weights, sizes):
    """Asserts that loss and gradient are those of the whole mini-batch."""
    built(of, targets, outputs, weights)
    rtol, atol = compare.TOLERANCES["float64"]
    expected = of.losses(targets, outputs, weights)
    received, _ = in_microbatches(of, targets, outputs, weights, sizes)
    compare.close(np.asarray(expected), received, "loss", rtol, atol)
    assert np.any(received)


REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")


FUNCTIONS = {"function": KINDS, "reduction": REDUCTIONS, "sizes": SIZES.values()}


@pytest.mark.parametrize(
    ",".join(FUNCTIONS),
    pairwise.all_pairs({name: [*values] for name, values in FUNCTIONS.items()}),
)
def test_any_function_under_any_reduction(function, reduction, sizes):
    of = compiled(Loss(function, reduction))
    assert_same(of, double(ROWS, 3), double(ROWS, 3, seed=1), None, sizes)


TARGETS = np.random.default_rng(2).integers(1, CLASSES, (ROWS, PLACES))
# Of the first rows much is left out, of the last little; of one, all.
IGNORED = np.where(np.arange(ROWS)[:, None] < TARGETS * 2, 0, TARGETS)
MASK = np.arange(PLACES) < (np.arange(ROWS)[:, None] * 2) % (PLACES + 1)
WEIGHTS = {
    "none": None,
    "of rows": double(ROWS, 1, seed=3),
    "of places": double(ROWS, PLACES, seed=4),
}


def test_a_loss_that_does_without_keras_reduction():
    class Own(Loss):
        def __call__(self, y, p, sample_weight=None):
            return tf.reduce_sum(self.function(y, p))

    assert_same(
        compiled(Own(squares)), double(ROWS, 3), double(ROWS, 3, seed=1), None, (6, 5)
    )


COUNTS = {
    "reduction": REDUCTIONS,
    "mask": (False, True),
    "ignored": (None, 0),
    "weights": tuple(WEIGHTS),
    "sizes": tuple(SIZES.values()),
}


@pytest.mark.parametrize(",".join(COUNTS), pairwise.all_pairs(COUNTS), ids=str)
def test_microbatches_with_masks_ignored_classes_and_weights_add_up_to_the_loss(
    reduction, mask, ignored, weights, sizes
):
    """Masks on predictions, classes that are left out, weights, or all of these."""
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=ignored, reduction=reduction
    )
    outputs = double(ROWS, PLACES, CLASSES)
    if mask:
        keras_internals.calls.set_mask(outputs, tf.constant(MASK))
    targets = tf.constant(TARGETS if ignored is None else IGNORED)
    assert_same(compiled(loss), targets, outputs, WEIGHTS[weights], sizes)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_rows_without_places(reduction):
    loss = Loss(squares_of_rows, reduction)
    x, y, w = double(ROWS, 3), double(ROWS, 3, seed=1), double(ROWS, seed=2)
    assert_same(compiled(loss), x, y, w, (4, 4, 3))
    assert_same(compiled(loss), x, y, w[:, None], (4, 4, 3))


# Beside the rows: axes of the values that are masked, and of weights that Keras takes.
RANKS = [
    ((), ()),
    ((), (1,)),
    ((1,), ()),
    ((1,), (1,)),
    ((PLACES,), (1,)),
    ((PLACES,), (PLACES,)),
    ((PLACES,), (PLACES, 1)),
]


@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "mean_with_sample_weight"]
)
@pytest.mark.parametrize(("axes", "of_weights"), RANKS)
def test_masks_meet_weights_of_any_rank(axes, of_weights, reduction):
    """The same rank, one axis less, one more; each microbatch has some that count."""
    targets, outputs = double(ROWS, *axes, 3), double(ROWS, *axes, 3, seed=1)
    mask = np.arange(outputs[..., 0].numpy().size).reshape(ROWS, *axes) % 3 != 1
    keras_internals.calls.set_mask(outputs, tf.constant(mask))
    weights = double(ROWS, *of_weights, seed=2)
    of = compiled(Loss(squares_of_rows, reduction))
    assert_same(of, targets, outputs, weights, (4, 4, 3))


def test_weights_of_zero_leave_a_loss_of_zero():
    of = compiled(Loss(squares_of_rows, "mean_with_sample_weight"))
    given = double(ROWS, 3), double(ROWS, 3, seed=1), tf.zeros(ROWS, tf.float64)
    built(of, *given)
    assert in_microbatches(of, *given, (4, 4, 3))[0] == 0.0


def test_several_losses_each_by_its_own_extent():
    """Weighted, and noted one by one as they are before that."""
    of = compiled(
        {"a": Loss(squares_of_rows), "b": Loss(sum_of_squares), "c": Loss(squares)},
        names="abc",
        loss_weights={"a": 0.5, "b": 2.0, "c": 3.0},
    )
    targets = {name: double(ROWS, 3, seed=i) for i, name in enumerate("abc")}
    outputs = {name: double(ROWS, 3, seed=9 + i) for i, name in enumerate("abc")}
    keras_internals.calls.set_mask(outputs["c"], tf.constant(MASK[:, :3]))
    built(of, targets, outputs)
    total, parts = in_microbatches(of, targets, outputs, None, (4, 4, 3))
    expected = of.losses(targets, outputs, None)
    singly = [tracker.result() for tracker in of.loss_trackers]
    rtol, atol = compare.TOLERANCES["float64"]
    compare.close(np.asarray(expected), total, "total", rtol, atol)
    compare.close(np.asarray(singly), parts, "parts", rtol, atol)
    assert len(parts) == 3


def test_the_gradient_goes_through_the_total_alone():
    of = compiled({"a": Loss(squares), "b": Loss(squares)}, names="ab")
    targets = {name: double(ROWS, 3) for name in "ab"}
    outputs = {name: double(ROWS, 3, seed=1) for name in "ab"}
    built(of, targets, outputs)
    head = losses.LossHead(
        of, loss_probes.probe_reductions(of, specs(targets), specs(outputs))
    )
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(outputs)
        total, parts, _ = head(targets, outputs, None, tf.ones([2], tf.float64))
    assert total.shape == (1,)
    assert parts.shape == (1, 2)
    assert np.any(tape.gradient(total, outputs)["a"])
    assert tape.gradient(parts, outputs) == {"a": None, "b": None}


def test_chosen_metrics_are_updated_and_no_others():
    of = compiled("mse", metrics=["mae", "mse"], weighted_metrics=["mae"])
    y, p = tf.zeros((2, 3)), tf.ones((2, 3))
    built(of, y, p)
    losses.update_metrics(of, y, p, tf.constant([1.0, 0.0]), lambda n: n != 1)
    assert [float(m.variables[1]) for m in of.metrics.metrics] == [2.0, 0.0, 1.0]
