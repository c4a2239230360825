"""Custom gradients go with their graph."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

import tfgpipe
from tfgpipe._compat import custom_gradients


def registered():
    """Returns the names of custom gradients that TensorFlow keeps."""
    gc.collect()
    return {x for x in ops.gradient_registry.list() if x.startswith("CustomGradient")}


@custom_gradients.custom_gradient
def tripled(x):
    """The gradient of one with a gradient of its own, ten times as large."""
    return 3.0 * x, lambda dy: 30.0 * dy


def test_eagerly_and_in_graphs_it_is_that_of_tensorflow():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tripled(x)
        return tape.gradient(y, x)

    x = tf.constant(2.0)
    assert float(gradient(x)) == 30
    assert float(tf.function(gradient)(x)) == 30
    assert float(tf.function(gradient, jit_compile=True)(x)) == 30


def test_a_tape_around_a_function_and_around_another_tape():
    inner = tf.function(lambda x: tripled(x) * x)
    x = tf.constant(2.0)
    with tf.GradientTape() as outside, tf.GradientTape() as tape:
        outside.watch(x)
        tape.watch(x)
        y = inner(x)
        first = tape.gradient(y, x)
    assert float(first) == 30 * 2 + 6
    assert float(outside.gradient(first, x)) == 30 + 30


@pytest.mark.parametrize("loop", [tf.cond, tf.while_loop])
def test_in_a_branch_and_in_a_loop(loop):
    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            if loop is tf.cond:
                y = tf.cond(x > 0, lambda: tripled(x), lambda: x)
            else:
                (y,) = tf.while_loop(
                    lambda y: y < 5.0, lambda y: (tripled(y),), [tf.identity(x)]
                )
        return tape.gradient(y, x)

    assert float(gradient(tf.constant(2.0))) == 30


def test_it_goes_with_its_graph():
    before = registered()

    def traced():
        function = tf.function(tripled).get_concrete_function(tf.TensorSpec([]))
        assert registered() > before
        return weakref.ref(function.graph)

    graph = traced()
    assert registered() == before
    assert graph() is None


def test_a_trained_pipeline_is_freed():
    before = registered()

    def trained():
        layers = [keras.layers.Dense(3) for _ in range(2)]
        pipelined = tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=2)
        model = keras.Sequential([keras.Input((3,)), pipelined])
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 3)), np.ones((4, 3)), verbose=0)
        return weakref.ref(model)

    model = trained()
    keras.utils.clear_session()
    assert registered() == before
    assert model() is None
