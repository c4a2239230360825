"""Dropout of some heads is the part of Keras' dropout of all heads."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfgpipe.tensor_parallel.head_dropout import dropped_heads

SEED = tf.constant([7, -13], tf.int32)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("T", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(8, 8), (5, 7), (1, 3)])
def test_a_shard_drops_what_keras_drops_of_its_heads(dtype, T, lengths):
    scores = tf.cast(np.random.default_rng(0).normal(size=(3, 6, *lengths)), dtype)
    expected = tf.nn.experimental.stateless_dropout(scores, 0.3, seed=SEED)
    received = [
        dropped_heads(part, rate=0.3, seed=SEED, num_heads=6, first=t * 6 // T)
        for t, part in enumerate(tf.split(scores, T, axis=1))
    ]
    np.testing.assert_array_equal(tf.concat(received, 1), expected)


def test_a_shard_draws_for_its_heads_alone_where_it_is():
    specs = [tf.TensorSpec((None, 2, None, 5)), tf.TensorSpec((2,), tf.int32)]

    @tf.function
    def second_half(scores, seed):
        with tf.device("CPU:2"):
            return dropped_heads(scores, rate=0.3, seed=seed, num_heads=4, first=2)

    function = second_half.get_concrete_function(*specs)
    sizes = [
        op.outputs[0].shape.num_elements()
        for op in function.graph.get_operations()
        if op.outputs and op.outputs[0].shape.is_fully_defined()
    ]
    assert max(sizes) <= 5
    loops = [op for op in function.graph.get_operations() if "While" in op.type]
    assert [op.device for op in loops] == ["/device:CPU:2"]
    scores = tf.ones((3, 4, 6, 5))
    expected = tf.nn.experimental.stateless_dropout(scores, 0.3, seed=SEED)
    np.testing.assert_array_equal(function(scores[:, 2:], SEED), expected[:, 2:])
