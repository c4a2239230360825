"""The most that a function holds, on functions small enough to add up by hand."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tests.helpers.traced_stages import ROWS, WIDTH, traced
from tfgpipe._util import sizes
from tfgpipe.graph import peak_memory

N = 64 * 64 * 4


def add_on(x):
    return x + 1.0


def chain(x):
    return tf.exp(tf.tanh(x + 1.0))


def fork(x):
    y = x + 1.0
    a, b = tf.exp(y), tf.tanh(y)  # The second into y.
    return a * b


def product(x):
    y = x + 1.0
    return y @ y


def products(x):
    y = x + 1.0
    z = y @ y  # Then y is free.
    return z @ z


def reshaped(x):
    y = tf.reshape(x + 1.0, [-1])
    return tf.exp(tf.reshape(y, [32, -1]))


def kept(x):
    y = x + 1.0
    return y, tf.exp(y), tf.reshape(y, [-1])


def dropped(x):
    y = tf.concat([x, x], 0)
    del y
    return x + 1.0


def squared(x):
    y = x + 1.0
    return tf.exp(y * y)  # Into y, though it is read twice.


def centred(x):
    y = x + 1.0
    return y - tf.reduce_sum(y, axis=1, keepdims=True)  # Into y, beside 64 sums.


def halved(x):
    a, _ = tf.split(x + 1.0, 2)  # The other half is freed at once.
    return tf.concat([a, a, a, a], 0)


def ended(x):
    y = tf.tanh(x + 1.0)
    z = tf.concat([y, y], 0)  # Then y is free, and z not.
    return z, tf.concat([x, x], 0)


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (add_on, 1),
        (chain, 1),
        (fork, 2),
        (product, 2),
        (products, 2),
        (reshaped, 1),
        (kept, 2),
        (dropped, 2),
        (squared, 1),
        (centred, 1 + 1 / 64),
        (halved, 1 / 2 + 2),
        (ended, 2 + 2),
    ],
)
def test_the_most_that_a_function_holds(function, most):
    concrete = tf.function(function, autograph=False).get_concrete_function(
        tf.TensorSpec([64, 64])
    )
    assert peak_memory.peak_bytes(concrete.graph) == most * N


def test_gradients_are_added_as_soon_as_they_are_there():
    def add_both(x, sums):
        gradients = [tf.exp(x), tf.tanh(x)]
        for each in gradients:  # Made after both, and run after each.
            flat = tf.reshape(each, [1, -1])
            sums = tf.raw_ops.InplaceAdd(x=sums, i=[0], v=flat)
        return sums

    concrete = tf.function(add_both, autograph=False).get_concrete_function(
        tf.TensorSpec([64, 64]), tf.TensorSpec([1, 64 * 64])
    )
    assert peak_memory.peak_bytes(concrete.graph) == N


def test_sums_in_place_take_nothing():
    """A backward of one layer makes a gradient of its weights, and adds it."""
    _, stage = traced([keras.layers.Dense(WIDTH, use_bias=False)], first=True)
    graph = stage.without_remat.backward.function.graph
    assert peak_memory.peak_bytes(graph) == WIDTH * WIDTH * 4


def test_a_recomputing_backward_holds_what_it_recomputes():
    depth = 5
    layers = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(depth)]
    _, stage = traced(layers)
    most = peak_memory.peak_bytes(stage.with_remat.backward.function.graph)
    activations = depth * ROWS * WIDTH * 4
    assert most >= activations
    gradient = WIDTH * WIDTH * 4  # Of one layer at a time.
    assert most <= activations + gradient + 2 * ROWS * WIDTH * 4
    saving = peak_memory.peak_bytes(stage.without_remat.backward.function.graph)
    assert gradient <= saving <= gradient + 2 * ROWS * WIDTH * 4


def test_buffers_are_counted_once():
    @tf.function(autograph=False)
    def function(x):
        y = x + 1.0
        return tf.reshape(y, [-1]), tf.identity(x), y

    graph = function.get_concrete_function(tf.TensorSpec([4, 4])).graph
    (x,), (y,) = (
        graph.inputs,
        [op for op in graph.get_operations() if op.type == "AddV2"],
    )
    found = peak_memory.distinct_buffers([x, *graph.outputs])
    assert [tensor.name for tensor in found] == [x.name, y.outputs[0].name]


def test_a_copy_on_another_device_is_in_a_buffer_of_its_own():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [4, 4])
        with tf.device("CPU:0"):
            y = x + 1.0
            here = tf.identity(y)
        with tf.device("CPU:1"):
            there = tf.identity(y)
    found = peak_memory.distinct_buffers([here, there])
    assert [tensor.name for tensor in found] == [y.name, there.name]


def test_sizes_that_are_not_known_count_as_one():
    assert sizes.num_bytes(tf.TensorSpec([None, 3])) == 12
    assert sizes.num_bytes(tf.TensorSpec(None)) == 0
    assert sizes.num_bytes(keras.KerasTensor((None, 5), "float16")) == 10
    assert sizes.num_bytes(keras.Variable([[1.0, 2.0]])) == 8
