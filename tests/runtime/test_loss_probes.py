"""Of what kind a loss is, and which metrics need the whole mini-batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.custom_losses import (
    KINDS,
    Loss,
    built,
    compiled,
    contrast,
    mean_of_what_is_there,
    mean_over_rows,
    root_of_mean,
    squares,
    sum_over_rows,
    whitened,
)
from tfgpipe.runtime import loss_probes

pytestmark = pytest.mark.usefixtures("double_precision")


def kind(loss, target=(3,), output=(3,), dtypes=("float64", "float64")):
    """Returns the kind of a loss of such targets and outputs."""
    of = compiled(loss)
    pairs = zip((target, output), dtypes, strict=True)
    given = [tf.TensorSpec([None, *shape], dtype) for shape, dtype in pairs]
    of.losses.build(*given)
    return loss_probes.probe_reductions(of, *given)[0]


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


def least(y, p):
    return tf.reduce_min(tf.square(y - p))


@pytest.mark.parametrize(
    "loss", [root_of_mean, whitened, contrast, mean_of_what_is_there, least]
)
def test_a_loss_that_mixes_rows_is_none(loss):
    words = (
        rf"loss '{loss.__name__}', which mixes the examples of a batch: of 6 it gives"
    )
    with pytest.raises(ValueError, match=words):
        kind(loss)


@pytest.mark.parametrize("reduction", [None, "none"])
def test_a_loss_that_is_not_reduced_is_none(reduction):
    with pytest.raises(ValueError, match=r"'squares' with reduction=None, which gives"):
        kind(Loss(squares, reduction))


class Picky:
    """A loss or metric that takes classes from 10 on, and raises an error else."""

    def __init__(self, error):
        self.error, self.__name__ = error, "picky"

    def __call__(self, y, p):
        if self.error is None:  # TensorFlow's own.
            tf.debugging.assert_greater(y, tf.cast(9, y.dtype))
        elif np.min(y) < 10:
            raise self.error("classes below 10")
        return tf.square(tf.cast(y, p.dtype) - p)


ERRORS = [None, ValueError, AssertionError, ZeroDivisionError]


@pytest.mark.parametrize("error", ERRORS)
def test_a_loss_that_cannot_be_tried_is_taken_to_give_values(error):
    """Noise can be out of what a loss takes."""
    words = r"Whether each loss gives a value.*Received 'picky' \(.*compare them"
    with pytest.warns(UserWarning, match=words):
        assert kind(Picky(error), dtypes=("int32", "float64")) == "values"


# -- metrics of the whole mini-batch --------------------------------------------------


def of_the_whole(metrics, shape=(3,), dtype="float64", **arguments):
    of = compiled("mse", metrics=metrics, **arguments)
    built(of, tf.ones((2, *shape), dtype), tf.ones((2, *shape), "float64"))
    given = (tf.TensorSpec([None, *shape], d) for d in (dtype, "float64"))
    return loss_probes.full_batch_metrics(of, *given)


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
    loss_probes.full_batch_metrics(of, *(tf.TensorSpec([None, 3]) for _ in range(2)))
    assert not any(np.any(v) for v in of.variables)


@pytest.mark.parametrize("error", ERRORS)
def test_a_metric_that_cannot_be_tried_is_named_in_a_warning(error):
    of = compiled("mse", metrics=[Picky(error)])
    built(of, tf.fill((2, 3), 10), tf.ones((2, 3), "float64"))
    given = (tf.TensorSpec([None, 3], d) for d in ("int32", "float64"))
    words = r"Whether each metric can be updated.*Received 'picky' \(.*compare them"
    with pytest.warns(UserWarning, match=words):
        assert loss_probes.full_batch_metrics(of, *given) == {}
