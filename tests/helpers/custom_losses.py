"""Losses of the user's own, and models' losses and metrics without the models."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals


def compiled(loss, metrics=None, weighted_metrics=None, names=("y",), **arguments):
    """Returns what a model compiled so has, and a way to build it."""
    inputs = keras.Input((1,))
    outputs = [keras.layers.Dense(1, name=name)(inputs) for name in names]
    model = keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])
    model.compile(
        loss=loss, metrics=metrics, weighted_metrics=weighted_metrics, **arguments
    )
    return keras_internals.compiled.compiled(model)


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


class Loss(keras.losses.Loss):
    """A loss of the user's, whatever its function gives and whatever its reduction."""

    def __init__(self, function, reduction="sum_over_batch_size"):
        super().__init__(name=function.__name__, reduction=reduction, dtype="float64")
        self.function = function

    def call(self, y, p):
        return self.function(y, p)


# Of these the mean over rows is not that of the rows' values.


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


def distance(y, p):
    return tf.reduce_mean(tf.abs(y - p))
