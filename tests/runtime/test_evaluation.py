"""Where nobody wants a gradient none is traced, and whoever wants one gets it."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare

layers = keras.layers


def stack():
    return [
        layers.Dense(8, activation="tanh"),
        layers.BatchNormalization(),
        layers.Dropout(0.5, seed=3),
        layers.Dense(4, activation="gelu"),
        layers.Dense(4),
    ]


def models(make=stack):
    """Returns a plain model, and one in two stages of the same weights."""
    plain = keras.Sequential([keras.Input((6,)), *make()])
    compare.fresh_names()
    pipelined = tfgpipe.PipelinedModel(
        make(), num_stages=2, num_microbatches=2, batch_norm="deferred"
    )
    pipelined(np.zeros((2, 6), "float32"))
    pipelined.set_weights(plain.get_weights())
    return plain, pipelined


def data(rows=8):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((rows, n)).astype("float32") for n in (6, 4)]


def traces(layer, *, evaluates):
    """Returns the joint graphs of stages, those without gradients or the others."""
    return [
        traced.trace
        for stage in layer.stages
        for known in stage._traced.values()
        for traced in known.values()
        if traced.options.evaluates == evaluates
    ]


def num_operations(joints):
    return sum(len(joint.graph.get_operations()) for joint in joints)


def gradient_operations(joints):
    """Returns the names of operations of a gradient, and of what is fed to one."""
    types = ("TanhGrad", "ReluGrad")
    ops = [op for joint in joints for op in joint.graph.get_operations()]
    fed = [name for joint in joints for name in joint.backward.given]
    return [op.name for op in ops if op.type in types] + fed


@pytest.mark.parametrize("what", ["evaluate", "predict"])
def test_evaluation_traces_no_gradient(what):
    _, model = models()
    x, y = data()
    model.compile("sgd", "mse")
    model.evaluate(x, y, verbose=0) if what == "evaluate" else model.predict(x)
    stages = traces(model.pipelined, evaluates=True)
    assert not traces(model.pipelined, evaluates=False)
    assert not gradient_operations(stages)
    with tf.GradientTape():
        model(x, training=False)
    differentiated = traces(model.pipelined, evaluates=False)
    assert gradient_operations(differentiated)
    assert num_operations(differentiated) > 1.5 * num_operations(stages[:2])


def test_training_and_evaluation_in_turns_are_those_of_the_plain_model(floatx):
    floatx("float64")  # In which a sum that nearly cancels is exact enough.
    plain, model = models(lambda: [layers.Dense(n, "gelu") for n in (8, 8, 4)])
    x, y = data()
    results = []
    for each in (plain, model):
        each.compile(keras.optimizers.SGD(0.1), "mse")
        found = []
        for _ in range(2):
            found.append(each.evaluate(x, y, verbose=0))
            found += each.fit(x, y, epochs=2, verbose=0).history["loss"]
            found.append(np.sum(each.predict(x, verbose=0)))
        results.append(found)
    np.testing.assert_allclose(*results, rtol=1e-10)


def test_outside_a_tape_a_layer_is_traced_without_gradients():
    _, model = models()
    x, _ = data()
    model(x)
    assert not traces(model.pipelined, evaluates=False)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x) ** 2)
    assert all(g is not None for g in tape.gradient(loss, model.trainable_weights))


@pytest.mark.parametrize("training", [False, True])
def test_a_tape_around_a_function_that_was_traced_outside_has_gradients(training):
    """The function is built before anybody knows that its gradient is wanted.

    Dropout draws in the second forward as in the first, whatever became of the weights
    in between.
    """
    _, model = models()
    x, _ = map(tf.constant, data())
    weights = model.trainable_weights
    with tf.GradientTape() as tape:  # Around the layer itself.
        loss = tf.reduce_sum(model(x, training=training) ** 2)
    expected = tape.gradient(loss, weights)
    state = [v.numpy() for v in model.variables]

    @tf.function
    def forward(x):
        return model(x, training=training)

    forward(x)  # Outside a tape.
    assert traces(model.pipelined, evaluates=True)
    for variable, value in zip(model.variables, state, strict=True):
        variable.assign(value)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(forward(x) ** 2)
        for weight in weights:
            weight.assign_add(tf.ones_like(weight))
    received = tape.gradient(loss, weights)
    if training:  # Seeds have moved on; the plain layer at these seeds is the measure.
        for variable, value in zip(model.variables, state, strict=True):
            variable.assign(value)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        expected = tape.gradient(loss, weights)
    compare.assert_allclose(received, expected, rtol=1e-4, atol=1e-5)


def test_what_draws_other_numbers_each_time_is_not_run_twice():
    # Random operations of two graphs may draw the same numbers.
    numbers = itertools.count(1)

    class Numbered(layers.Layer):
        def call(self, x):
            number = tf.numpy_function(lambda: np.float32(next(numbers)), [], "float32")
            return x * tf.ensure_shape(number, [])

    layer = tfgpipe.PipelinedLayer(
        [Numbered(), layers.Dense(1, kernel_initializer="ones", use_bias=False)],
        num_stages=2,
        num_microbatches=2,
    )
    x = tf.ones((4, 3))
    layer(x)

    @tf.function
    def forward(x):
        return layer(x, training=False)

    forward(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = forward(x)
    # y is 3 n for the number n of the microbatch, and dy / dx is n.
    np.testing.assert_allclose(tape.gradient(y, x)[:, 0] * 3, y[:, 0], rtol=1e-5)
