"""The loss of a mini-batch, put together of its microbatches', without a pipeline."""

from __future__ import annotations

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import compare
from tfgpipe import losses, seams, trials

ROWS, PLACES, CLASSES = 11, 4, 5
SIZES = {
    "equal but for one": (4, 4, 3),
    "unequal": (1, 6, 4),
    "one of nothing": (2, 9, 0),
}


def compiled(loss, metrics=None, weighted_metrics=None, names=("y",), **arguments):
    """Returns what a model compiled so has, and a way to build it."""
    inputs = keras.Input((1,))
    outputs = [keras.layers.Dense(1, name=name)(inputs) for name in names]
    model = keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])
    model.compile(
        loss=loss, metrics=metrics, weighted_metrics=weighted_metrics, **arguments
    )
    return seams.compiled(model)


def built(of, targets, outputs, weights=None):
    """Builds losses and metrics, as Keras does, on a whole batch."""
    of.losses(targets, outputs, weights)
    if of.metrics is not None:
        of.metrics.update_state(targets, outputs, weights)
        of.metrics.reset_state()
    return of


def specs(tensors):
    return keras.tree.map_structure(
        lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), tensors
    )


def cut(structure, sizes):
    """Cuts tensors, with the masks on them, into microbatches."""

    def rows(tensor, some):
        if tensor is None:
            return None
        piece, mask = tensor[some], seams.get_mask(tensor)
        if mask is not None:
            seams.set_mask(piece, mask[some])
        return piece

    ends = list(itertools.accumulate(sizes))
    for some in map(slice, [0, *ends], ends):
        yield keras.tree.map_structure(functools.partial(rows, some=some), structure)


def in_microbatches(of, targets, outputs, weights, sizes):
    """Returns the total, and each loss that is tracked, as a pipeline takes them."""
    kinds = trials.kinds_of(of, specs(targets), specs(outputs))
    head = losses.Head(of, kinds)
    given = (targets, outputs, weights)
    head(*next(cut(given, sizes)), tf.zeros([sizes[0], len(kinds)], tf.float64))
    found = losses.extents(of, kinds, *given, masks_values=head.masks_values)
    parts = [
        head(*piece, tf.tile(found[None], [size, 1]))
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


def double(*shape, seed=0):
    return tf.constant(np.random.default_rng(seed).uniform(0.1, 1.0, shape))


def squares_of_rows(y, p):
    return tf.reduce_sum(tf.square(y - p), axis=-1)


def squares(y, p):
    return tf.square(y - p)


def mean_of_squares(y, p):
    return tf.reduce_mean(tf.square(y - p))


def sum_of_squares(y, p):
    return tf.reduce_sum(tf.square(y - p))


def mean_over_rows(y, p):
    return tf.reduce_mean(tf.square(y - p), axis=0)


def sum_over_rows(y, p):
    return tf.reduce_sum(tf.square(y - p), axis=0)


KINDS = {
    squares_of_rows: "values",
    squares: "values",
    mean_of_squares: "mean",
    mean_over_rows: "mean",
    sum_of_squares: "sum",
    sum_over_rows: "sum",
}
REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")


class Loss(keras.losses.Loss):
    """A loss of the user's, whatever its function gives and whatever its reduction."""

    def __init__(self, function, reduction="sum_over_batch_size"):
        super().__init__(name=function.__name__, reduction=reduction, dtype="float64")
        self.function = function

    def call(self, y, p):
        return self.function(y, p)


@pytest.fixture(autouse=True)
def double_precision(floatx):
    floatx("float64")


# -- what is put together -------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("function", KINDS)
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


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("ignored", [None, 0])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_counts(reduction, mask, ignored, weights, sizes):
    """Masks on predictions, classes that are left out, weights, or all of these."""
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=ignored, reduction=reduction
    )
    outputs = double(ROWS, PLACES, CLASSES)
    if mask:
        seams.set_mask(outputs, tf.constant(MASK))
    targets = tf.constant(TARGETS if ignored is None else IGNORED)
    assert_same(compiled(loss), targets, outputs, WEIGHTS[weights], sizes)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_rows_without_places(reduction):
    loss = Loss(squares_of_rows, reduction)
    x, y, w = double(ROWS, 3), double(ROWS, 3, seed=1), double(ROWS, seed=2)
    assert_same(compiled(loss), x, y, w, (4, 4, 3))
    assert_same(compiled(loss), x, y, w[:, None], (4, 4, 3))


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
    seams.set_mask(outputs["c"], tf.constant(MASK[:, :3]))
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
    head = losses.Head(of, trials.kinds_of(of, specs(targets), specs(outputs)))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(outputs)
        total, parts = head(targets, outputs, None, tf.ones([ROWS, 2], tf.float64))
    assert total.shape == (1,)
    assert parts.shape == (1, 2)
    assert np.any(tape.gradient(total, outputs)["a"])
    assert tape.gradient(parts, outputs) == {"a": None, "b": None}


# -- what kind a loss is of -----------------------------------------------------------


def kind(loss, target=(3,), output=(3,), dtypes=("float64", "float64")):
    """Returns the kind of a loss of such targets and outputs."""
    of = compiled(loss)
    pairs = zip((target, output), dtypes, strict=True)
    given = [tf.TensorSpec([None, *shape], dtype) for shape, dtype in pairs]
    of.losses.build(*given)
    return trials.kinds_of(of, *given)[0]


@pytest.mark.parametrize("function", KINDS)
def test_the_kind_of_a_loss(function):
    assert kind(function) == KINDS[function]


# Whose values of a row do not depend on other rows, whatever the targets' type.
OF_KERAS = [
    ("mse", "float64"),
    ("mae", "float64"),
    ("huber", "float64"),
    ("binary_crossentropy", "float64"),
    ("categorical_crossentropy", "float64"),
    ("cosine_similarity", "float64"),
    ("kl_divergence", "float64"),
    ("poisson", "float64"),
    ("hinge", "float64"),
    ("mape", "float64"),
    ("msle", "float64"),
    ("binary_crossentropy", "int32"),
    ("categorical_crossentropy", "int64"),
    ("binary_crossentropy", "bool"),
]


@pytest.mark.parametrize(("loss", "dtype"), OF_KERAS)
def test_losses_of_keras_give_values(loss, dtype):
    assert kind(loss, dtypes=(dtype, "float64")) == "values"


def test_a_loss_that_does_without_keras_reduction():
    class Own(Loss):
        def __call__(self, y, p, sample_weight=None):
            return tf.reduce_sum(self.function(y, p))

    assert kind(Own(squares)) == "sum"
    assert_same(
        compiled(Own(squares)), double(ROWS, 3), double(ROWS, 3, seed=1), None, (6, 5)
    )


@pytest.mark.parametrize("dtype", ["int32", "float64"])
@pytest.mark.parametrize("target", [(), (1,)])
def test_sparse_classes_as_integers_or_floats(target, dtype):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert kind(loss, target, dtypes=(dtype, "float64")) == "values"


@pytest.mark.parametrize(
    ("target", "output"),
    [((4,), (None, 5)), ((None,), (4, 5)), ((None,), (None, 5))],
)
def test_sizes_that_only_targets_or_only_outputs_tell(target, output):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert kind(loss, target, output, ("int32", "float64")) == "values"


def test_a_loss_of_as_many_numbers_as_there_are_rows_tried():
    """A mean over rows is no value for each, even if there are as many."""
    assert kind(mean_over_rows, (6,), (6,)) == "mean"
    assert kind(sum_over_rows, (6,), (6,)) == "sum"
    assert kind(squares, (6,), (6,)) == "values"


def root_of_mean(y, p):
    return tf.sqrt(tf.reduce_mean(tf.square(y - p)))


def whitened(y, p):
    return tf.square(y - (p - tf.reduce_mean(p, axis=0)))


def contrast(y, p):
    scores = tf.matmul(y, p, transpose_b=True)
    return -tf.linalg.diag_part(tf.nn.log_softmax(scores))


def mean_of_what_is_there(y, p):
    there = tf.cast(y > 0.0, p.dtype)
    return tf.reduce_sum(there * tf.square(y - p)) / tf.reduce_sum(there)


def least(y, p):
    return tf.reduce_min(tf.square(y - p))


@pytest.mark.parametrize(
    "loss", [root_of_mean, whitened, contrast, mean_of_what_is_there, least]
)
def test_a_loss_that_mixes_rows_is_none(loss):
    words = rf"loss '{loss.__name__}', which mixes the rows of a batch: of 6 rows it g"
    with pytest.raises(ValueError, match=words):
        kind(loss)


@pytest.mark.parametrize("reduction", [None, "none"])
def test_a_loss_that_is_not_reduced_is_none(reduction):
    with pytest.raises(ValueError, match=r"'squares' with reduction=None, which gives"):
        kind(Loss(squares, reduction))


def test_a_loss_that_cannot_be_tried_is_taken_to_give_values():
    """Noise can be out of what a loss takes, as here where classes are from 10 on."""

    def picky(y, p):
        with tf.control_dependencies([tf.debugging.assert_greater(y, 9)]):
            return tf.square(tf.cast(y, p.dtype) - p)

    assert kind(picky, dtypes=("int32", "float64")) == "values"


# -- metrics of the whole mini-batch --------------------------------------------------


def of_the_whole(metrics, shape=(3,), dtype="float64", **arguments):
    of = compiled("mse", metrics=metrics, **arguments)
    built(of, tf.ones((2, *shape), dtype), tf.ones((2, *shape), "float64"))
    given = (tf.TensorSpec([None, *shape], d) for d in (dtype, "float64"))
    return trials.metrics_of_the_whole(of, *given)


def distance(y, p):
    return tf.reduce_mean(tf.abs(y - p))


def test_metrics_that_need_the_whole_mini_batch():
    found = of_the_whole(
        [
            "mae",
            keras.metrics.PearsonCorrelation(axis=0, name="along rows"),
            keras.metrics.PearsonCorrelation(name="of each row"),
            distance,
            keras.metrics.RootMeanSquaredError(),
            keras.metrics.R2Score(),
        ],
        weighted_metrics=["mae", distance],
    )
    assert found == {1: "along rows", 3: "distance", 7: "distance"}


@pytest.mark.parametrize(
    "metric",
    [
        "mse",
        "cosine_similarity",
        keras.metrics.AUC,
        keras.metrics.Precision,
        keras.metrics.F1Score,
        keras.metrics.MeanSquaredError,
        lambda: keras.metrics.PrecisionAtRecall(0.5),
        keras.metrics.LogCoshError,
    ],
)
def test_metrics_that_count_or_sum_do_not(metric):
    metric = metric if isinstance(metric, str) else metric()
    assert of_the_whole([metric]) == {}


@pytest.mark.parametrize("dtype", ["int32", "float64"])
def test_a_metric_of_what_is_there_needs_it(dtype):
    def share(y, p):
        there = tf.cast(y > 0, tf.float64)
        return tf.reduce_sum(there * p) / tf.reduce_sum(there)

    assert of_the_whole([share], dtype=dtype) == {0: "share"}


def test_trying_metrics_leaves_them_as_they_are():
    of = compiled("mse", metrics=["mae"])
    built(of, tf.ones((2, 3)), tf.ones((2, 3)))
    trials.metrics_of_the_whole(of, *(tf.TensorSpec([None, 3]) for _ in range(2)))
    assert not any(np.any(v) for v in of.variables)


def test_chosen_metrics_are_updated_and_no_others():
    of = compiled("mse", metrics=["mae", "mse"], weighted_metrics=["mae"])
    y, p = tf.zeros((2, 3)), tf.ones((2, 3))
    built(of, y, p)
    losses.update_metrics(of, y, p, tf.constant([1.0, 0.0]), lambda n: n != 1)
    assert [float(m.variables[1]) for m in of.metrics.metrics] == [2.0, 0.0, 1.0]
