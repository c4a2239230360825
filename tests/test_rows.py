"""Layers that treat rows one by one, and those that do not."""

from __future__ import annotations

import warnings

import keras
import pytest
import tensorflow as tf

import tfgpipe
from tests.stacks import STACKS, ResidualBlock

ops = keras.ops


def build(*layers, num_microbatches=2, shape=(None, 4)):
    tfgpipe.PipelinedLayer(
        list(layers), num_stages=len(layers), num_microbatches=num_microbatches
    ).build(shape)


class Layer(keras.layers.Layer):
    """A layer of a function."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


MIXING = {
    "centred": lambda x: x - ops.mean(x, axis=0),
    "softmax over the batch": lambda x: ops.softmax(x, axis=0),
    "scaled by all": lambda x: x / (1.0 + ops.sum(x)),
    "through a reshape": lambda x: x - ops.mean(ops.reshape(x, (-1,))),
    "backwards": lambda x: ops.flip(x, axis=0),
    "products of rows": lambda x: ops.matmul(x, ops.transpose(x)),
    "in an inner function": tf.function(lambda x: x - tf.reduce_mean(x, axis=0)),
}


@pytest.mark.parametrize("name", list(MIXING))
def test_a_layer_that_mixes_rows_is_named_in_a_warning(name):
    words = r"Layer 'mixer' mixes the rows.*one microbatch at a time.*outside the pipe"
    with pytest.warns(UserWarning, match=words):
        build(keras.layers.Dense(4), Layer(MIXING[name], name="mixer"))


def test_an_operation_that_mixes_rows_is_named_too():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(4)(inputs)
    model = keras.Model(inputs, ops.softmax(hidden, axis=0))
    with pytest.warns(UserWarning, match="'softmax' mixes the rows"):
        tfgpipe.PipelinedLayer(model, num_stages=2, num_microbatches=2)


def test_with_one_microbatch_rows_may_mix():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(keras.layers.Dense(4), Layer(MIXING["centred"]), num_microbatches=1)


class Looks(keras.layers.Layer):
    """Looks at the whole batch for a loss and a safe exponential."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        rows = tf.cast(tf.shape(x)[0], x.dtype)
        flat = tf.reshape(x, (-1, 2))
        self.add_loss(tf.reduce_sum(x) / rows)
        total = tf.reduce_sum(flat * flat, axis=-1)
        x = x * tf.reduce_mean(self.w) + tf.reshape(total, tf.shape(x[:, :2]))[:, :1]
        largest = tf.reduce_max(x)
        return tf.math.log(tf.exp(x - largest)) + largest


def test_rows_that_stay_apart_give_no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mixes the rows")
        build(ResidualBlock(4), Looks(), keras.layers.Lambda(lambda x: x * 2.0))
        for stack in STACKS.values():
            layers = stack.make()
            tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=2).build(
                (None, *stack.shape)
            )


def test_many_layers_of_a_kind_are_traced_once():
    traced = []

    class Counted(keras.layers.Layer):
        def call(self, x):
            traced.append(x.shape[0])
            return x

    build(*(Counted() for _ in range(6)))
    assert traced.count(8191) == traced.count(5) == 1
