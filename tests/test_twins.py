"""Stages of equal layers share one trace; others do not."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests import compare
from tfgpipe import recording, stage, twins

layers = keras.layers


class Scaled(layers.Layer):
    """Computes by whatever its attribute is."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        factor = self.factor
        while callable(factor):
            factor = factor()
        if isinstance(factor, dict | list):
            factor = tf.add_n([tf.cast(v, x.dtype) for v in tf.nest.flatten(factor)])
        return x * self.w * tf.cast(factor, x.dtype)


class Named(layers.Layer):
    """Computes by its name."""

    def call(self, x):
        return x * len(self.name)


class Initialized(layers.Layer):
    """Computes by its initializer, as no layer of Keras does."""

    def __init__(self, state_initializer):
        super().__init__()
        self.state_initializer = state_initializer

    def call(self, x):
        return x + self.state_initializer(x.shape[-1:], x.dtype)


class Link:
    """A plain object."""

    def __init__(self, before):
        self.before = before


class Linked(Scaled):
    def __init__(self, length):
        super().__init__(2.0)
        self.chain = None
        for _ in range(length):
            self.chain = Link(self.chain)


def with_attribute(value):
    def function():
        return function.value

    function.value = value
    return function


def wired(model):
    inputs = keras.Input((4,))
    hidden = layers.Activation("relu", name="r")(inputs)
    outputs = layers.Activation("tanh", name="t")(hidden)
    return keras.Model(inputs, layers.Add()([outputs, inputs if model else hidden]))


def part(*stack):
    recorded = recording.from_layers(stack, keras.Input((4,)), {})
    return recorded.network.part(slice(0, len(stack)))


def are_twins(a, b):
    return twins.description(part(*a)) == twins.description(part(*b))


def constant(value):
    return lambda: value


def tied():
    dense = layers.Dense(4)
    return [dense, dense]


EQUAL = {
    "dense": lambda: [layers.Dense(4, activation="relu"), layers.Dense(4)],
    "names": lambda: [layers.Dense(4, name=f"a{np.random.randint(10**9)}")],
    "initializers": lambda: [layers.Dense(4, kernel_initializer="he_normal")],
    "dropout": lambda: [layers.Dropout(0.5), layers.Dense(4)],
    "norm": lambda: [layers.LayerNormalization(), layers.Dense(4)],
    "numbers": lambda: [Scaled(2.0)],
    "arrays": lambda: [Scaled(np.float32([1, 2, 3, 4]))],
    "containers": lambda: [Scaled({"a": [1.0, 2.0]})],
    "closures": lambda: [Scaled(constant(3.0))],
    "partial": lambda: [Scaled(functools.partial(constant, 3.0))],
    "tied": tied,
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_equal_layers_are_twins(make):
    assert are_twins(make(), make())


def frozen():
    dense = layers.Dense(4)
    dense.trainable = False
    return dense


OTHER = {
    "class": ([layers.Dense(4)], [Scaled(1.0)]),
    "activation": ([layers.Dense(4)], [layers.Dense(4, activation="relu")]),
    "units": ([layers.Dense(4)], [layers.Dense(5)]),
    "bias": ([layers.Dense(4)], [layers.Dense(4, use_bias=False)]),
    "dtype": ([layers.Dense(4)], [layers.Dense(4, dtype="float64")]),
    "frozen": ([layers.Dense(4)], [frozen()]),
    "rate": ([layers.Dropout(0.5)], [layers.Dropout(0.4)]),
    "number": ([Scaled(2.0)], [Scaled(3.0)]),
    "type of a number": ([Scaled(1)], [Scaled(True)]),
    "sign of zero": ([Scaled(0.0)], [Scaled(-0.0)]),
    "array": ([Scaled(np.float32([1]))], [Scaled(np.float32([2]))]),
    "contained": ([Scaled({"a": [1.0]})], [Scaled({"a": [2.0]})]),
    "closed over": ([Scaled(constant(3.0))], [Scaled(constant(4.0))]),
    "partial": (
        [Scaled(functools.partial(constant, 3.0))],
        [Scaled(functools.partial(constant, 4.0))],
    ),
    "tied": (tied(), [layers.Dense(4), layers.Dense(4)]),
    "tensor": ([Scaled(tf.constant(1.0))], [Scaled(tf.constant(1.0))]),
    "name that is read": ([Named(name="a")], [Named(name="bb")]),
    "initializer that is called": (
        [Initialized(keras.initializers.Zeros())],
        [Initialized(keras.initializers.Ones())],
    ),
    "attribute of a function": (
        [Scaled(with_attribute(2))],
        [Scaled(with_attribute(3))],
    ),
    "wiring": ([wired(True)], [wired(False)]),
    "models": (
        [keras.Sequential([layers.Dense(4)])],
        [keras.Sequential([layers.Dense(4)])],
    ),
}


@pytest.mark.parametrize(("a", "b"), OTHER.values(), ids=OTHER)
def test_other_layers_are_not(a, b):
    assert not are_twins(a, b)


def test_what_is_described_stays():
    """An `id` may come again once its object is gone."""
    descriptions = {
        twins.description(part(Scaled(tf.constant(1.0)))) for _ in range(20)
    }
    assert len(descriptions) == 20


def test_plain_objects_are_equal_only_if_the_same():
    a, b = Linked(3), Linked(3)
    assert not are_twins([a], [b])
    b.chain = a.chain
    assert are_twins([a], [b])
    assert not are_twins([Linked(5000)], [Linked(5000)])  # Nor is the chain followed.


def traces(monkeypatch):
    """Counts the stages that are traced from now on."""
    traced = []

    def counted(body, **arguments):
        traced.append(body)
        return original(body, **arguments)

    original = stage.trace
    monkeypatch.setattr(stage, "trace", counted)
    return traced


def test_equal_stages_are_traced_once_and_computed_each_with_its_weights(monkeypatch):
    traced = traces(monkeypatch)

    def stack():
        return [layers.Dense(6, activation="tanh") for _ in range(4)]

    plain, pipelined = compare.pair(
        stack, (6,), "float32", num_stages=4, num_microbatches=2, remat="none"
    )
    x = np.random.default_rng(0).standard_normal((4, 6)).astype("float32")
    with tf.GradientTape(persistent=True) as tape:
        expected, received = plain(x, training=True), pipelined(x, training=True)
        losses = [tf.reduce_sum(tf.square(y)) for y in (expected, received)]
    np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)
    for loss, model in zip(losses, (plain, pipelined), strict=True):
        model.gradients = tape.gradient(loss, model.trainable_variables)
    for a, b in zip(plain.gradients, pipelined.gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert len(traced) == 1


def test_dropout_of_equal_stages_draws_from_each_ones_seeds(monkeypatch):
    traced = traces(monkeypatch)
    stack = [layers.Dropout(0.5) for _ in range(2)]
    layer = tfgpipe.PipelinedLayer(stack, num_stages=2, num_microbatches=1)
    x = np.ones((64, 64), "float32")
    y = layer(x, training=True).numpy()
    assert len(traced) == 1
    # Both masks being the same, half the numbers would be 4; else, a quarter are.
    assert 0.15 < np.mean(y == 4) < 0.35


def test_stages_that_differ_are_traced_each(monkeypatch):
    traced = traces(monkeypatch)
    stack = [Scaled(2.0), Scaled(3.0), Scaled(2.0)]
    layer = tfgpipe.PipelinedLayer(stack, num_stages=3, num_microbatches=1)
    np.testing.assert_allclose(layer(np.ones((2, 4), "float32")), np.full((2, 4), 12.0))
    assert len(traced) == 2
