"""Stages of equal layers share one trace; others do not."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from benchmarks import workloads
from tests.helpers import compare
from tfgpipe.capture import tracer
from tfgpipe.capture.ir import Call, Segment, Value
from tfgpipe.stage import dedup, stage
from tfgpipe_params.lm import transformer

layers = keras.layers


class Scaled(layers.Layer):
    """Computes by whatever its attribute is."""

    config_is_complete = True

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        factor = self.factor
        if isinstance(factor, dict | list):
            factor = tf.add_n([tf.cast(v, x.dtype) for v in tf.nest.flatten(factor)])
        return x * self.w * tf.cast(factor, x.dtype)

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


class Subclassed(Scaled):
    """Does not promise what its base class does."""


class Unknown(layers.Layer):
    """Promises nothing."""

    def call(self, x):
        return x


class Broken(layers.Layer):
    config_is_complete = True

    def call(self, x):
        return x

    def get_config(self):
        raise AttributeError("no such attribute")


class Wraps(layers.Layer):
    """Holds a layer that it promises to know all of."""

    config_is_complete = True

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def call(self, x):
        return self.inner(x)

    def get_config(self):
        inner = keras.saving.serialize_keras_object(self.inner)
        return {**super().get_config(), "inner": inner}


def as_it_is(x):
    return tf.nn.relu(x)


def relu(x):
    return tf.nn.relu6(x)


def part(*stack):
    recorded = tracer.capture_layers(stack, keras.Input((4,)), {})
    return recorded.graph.segment(slice(0, len(stack)))


def are_twins(a, b):
    described = dedup.structure(part(*a))
    return described is not None and described == dedup.structure(part(*b))


def tied():
    dense = layers.Dense(4)
    return [dense, dense]


EQUAL = {
    "dense": lambda: [layers.Dense(4, activation="relu"), layers.Dense(4)],
    "names": lambda: [layers.Dense(4, name=f"a{np.random.randint(10**9)}")],
    "names inside": lambda: [
        Wraps(layers.Dense(4, name=f"a{np.random.randint(10**9)}"))
    ],
    "initializers": lambda: [
        layers.Dense(4, kernel_initializer=keras.initializers.HeNormal(int(s)))
        for s in np.random.randint(10**9, size=2)
    ],
    "seeds": lambda: [layers.Dropout(0.5, seed=np.random.randint(10**9))],
    "regularizers": lambda: [layers.Dense(4, activity_regularizer="l2")],
    "norm": lambda: [layers.LayerNormalization(), layers.Dense(4)],
    "numbers": lambda: [Scaled(2.0)],
    "arrays": lambda: [Scaled(np.float32([1, 2, 3, 4]))],
    "containers": lambda: [Scaled({"a": [1.0, 2.0]})],
    "layers inside": lambda: [Wraps(Scaled(2.0)), Wraps(layers.Dense(4))],
    "tied": tied,
    "a block of params/": lambda: [
        keras.layers.Reshape((1, 4)),
        transformer.Block(width=4, num_heads=2, mlp_width=8, dropout=0.1),
    ],
    "a block of benchmarks/": lambda: [
        keras.layers.Reshape((1, 4)),
        workloads.EncoderBlock(num_heads=2),
    ],
    "shards": lambda: [
        tfgpipe.layers.TPMLP(8, units=4, num_shards=2),
        tfgpipe.layers.TPDense(4, num_shards=2),
    ],
    "shards of attention": lambda: [
        keras.layers.Reshape((2, 2)),
        transformer.Block(width=2, num_heads=2, mlp_width=4, num_shards=2),
    ],
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_layers_of_one_class_and_configuration_are_twins(make):
    assert are_twins(make(), make())


def frozen():
    dense = layers.Dense(4)
    dense.trainable = False
    return dense


def frozen_inside():
    wrapper = Wraps(layers.BatchNormalization(center=False, scale=False))
    wrapper.inner.trainable = False
    return wrapper


# Too many to print.
RISING = np.arange(4096).reshape(1024, 4)
CHANGED = np.where(RISING == 2048, 0, RISING)

OTHER = {
    "class": ([layers.Dense(4)], [Scaled(1.0)]),
    "activation": ([layers.Dense(4)], [layers.Dense(4, activation="relu")]),
    "units": ([layers.Dense(4)], [layers.Dense(5)]),
    "bias": ([layers.Dense(4)], [layers.Dense(4, use_bias=False)]),
    "dtype": ([layers.Dense(4)], [layers.Dense(4, dtype="float64")]),
    # Variables are single precision both times.
    "policy": ([layers.Dense(4)], [layers.Dense(4, dtype="mixed_bfloat16")]),
    "autocast": ([Scaled(2.0)], [Scaled(2.0, autocast=False)]),
    "frozen": ([layers.Dense(4)], [frozen()]),
    "frozen inside": (
        [Wraps(layers.BatchNormalization(center=False, scale=False))],
        [frozen_inside()],
    ),
    "rate": ([layers.Dropout(0.5)], [layers.Dropout(0.4)]),
    "rate inside": ([Wraps(layers.Dropout(0.5))], [Wraps(layers.Dropout(0.4))]),
    "number": ([Scaled(2.0)], [Scaled(3.0)]),
    "type of a number": ([Scaled(1)], [Scaled(True)]),
    "sign of zero": ([Scaled(0.0)], [Scaled(-0.0)]),
    "array": ([Scaled(np.float32([1]))], [Scaled(np.float32([2]))]),
    # Of the same bytes.
    "dtype of an array": ([Scaled(np.float32([0]))], [Scaled(np.int32([0]))]),
    "shape of an array": ([Scaled(np.ones(4))], [Scaled(np.ones((1, 4)))]),
    "middle of an array": ([Scaled(RISING)], [Scaled(CHANGED)]),
    "key": ([Scaled({"a": [1.0]})], [Scaled({"b": [1.0]})]),
    "container": ([Scaled([1.0])], [Scaled((1.0,))]),
    "order": ([Scaled([1.0, 2.0])], [Scaled([2.0, 1.0])]),
    "contained": ([Scaled({"a": [1.0]})], [Scaled({"a": [2.0]})]),
    "tied": (tied(), [layers.Dense(4), layers.Dense(4)]),
}


@pytest.mark.parametrize(("a", "b"), OTHER.values(), ids=OTHER)
def test_layers_that_differ_are_no_twins(a, b):
    assert dedup.structure(part(*a)) is not None
    assert not are_twins(a, b)


def calls(
    *, first=(0, 1), second=(2, 0), factor=2.0, tied=True, ends=(3,), starts=(0, 1)
):
    """Returns the structure of `dense(dense(x0) - x0) * factor - x1`, or a like one."""
    one, other = layers.Dense(4), layers.Dense(4)
    for layer in (one, other):
        layer.build((None, 4))
    subtract = layers.Subtract()
    scale = Scaled(1.0)
    called = [
        Call(one, (Value(first[0]),), {}, (first[0],), (2,)),
        Call(subtract, ([Value(i) for i in second],), {}, second, (3,)),
        Call(one if tied else other, (Value(3),), {}, (3,), (4,)),
        Call(scale, (Value(4),), {"factor": factor}, (4,), (5,)),
        Call(subtract, ([Value(5), Value(first[1])],), {}, (5, first[1]), (6,)),
    ]
    return dedup.structure(Segment(tuple(called), starts, (*ends, 6)))


@pytest.mark.parametrize(
    "change",
    [
        {"first": (1, 0)},
        {"second": (0, 2)},
        {"second": (2, 1)},
        {"factor": 3.0},
        {"factor": 2},
        {"tied": False},
        {"ends": (4,)},
        {"ends": ()},
        {"ends": (3, 4)},
        {"starts": (1, 0)},
    ],
)
def test_segments_that_differ_in_one_respect_are_no_twins(change):
    assert calls() == calls()
    assert len({None, calls(), calls(**change)}) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (slice(0, 4), slice(0, 5)),
        (slice(None, 4), slice(4, None)),
        (slice(0, 4), slice(0, 4, 2)),
        (tf.float32, tf.float64),
        (np.float32(1), np.float64(1)),
        ((1, 2), [1, 2]),
        ("a", b"a"),
        (..., None),
        (1 + 2j, 1 - 2j),
    ],
)
def test_arguments_that_differ_tell_segments_apart(one, other):
    assert calls(factor=one) == calls(factor=one)
    assert len({None, calls(factor=one), calls(factor=other)}) == 3


def called_otherwise():
    dense = layers.Dense(4)
    dense.call = lambda x: x
    return dense


UNKNOWN = {
    "class": Unknown,
    "subclass": lambda: Subclassed(2.0),
    "class inside": lambda: Wraps(Unknown()),
    "function": lambda: layers.Lambda(lambda x: x),
    "activation": lambda: layers.Dense(4, activation=as_it_is),
    "activation by the name of Keras' own": lambda: layers.Dense(4, activation=relu),
    "activation without a name": lambda: layers.Dense(4, activation=lambda x: x),
    "object": lambda: Scaled(tf.constant(1.0)),
    "model": lambda: keras.Sequential([layers.Dense(4)]),
    "adapted": lambda: layers.Normalization(mean=0.0, variance=1.0),
    "method of one object": called_otherwise,
    "configuration that fails": Broken,
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.filterwarnings("error")
def test_what_a_configuration_may_not_tell_is_unknown(make):
    assert dedup.structure(part(make())) is None


class Slotted(layers.Layer):
    """Computes by what is in no dictionary of attributes."""

    __slots__ = ("factor",)

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return x * self.factor


FACTORS = {"two": 2.0, "three": 3.0}


def factor_of(layer):
    return FACTORS[layer.name]


class ByHelper(layers.Layer):
    """Computes by its name, which another function looks up."""

    def call(self, x):
        return x * factor_of(self)


def times(factor):
    return lambda x: x * factor


SILENT = {
    "slots": lambda: [Slotted(2.0), Slotted(3.0)],
    "helper": lambda: [ByHelper(name="two"), ByHelper(name="three")],
    "closure": lambda: [layers.Lambda(times(2.0)), layers.Lambda(times(3.0))],
}


@pytest.mark.parametrize("make", SILENT.values(), ids=SILENT)
def test_what_no_configuration_holds_has_the_right_gradient(make):
    layer = tfgpipe.PipelinedLayer(make(), num_stages=2, num_microbatches=1)
    x = tf.ones((2, 4))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
    np.testing.assert_array_equal(y, np.full((2, 4), 6.0))
    np.testing.assert_array_equal(tape.gradient(y, x), np.full((2, 4), 6.0))


SHARED = []


class ByShared(layers.Layer):
    config_is_complete = True

    def call(self, x):
        return tf.matmul(x, SHARED[-1].kernel)


def test_equal_stages_may_both_use_a_variable_of_another_layer():
    """A trace with captured variables is of one stage alone."""
    shared = layers.Dense(4, use_bias=False, kernel_initializer="identity")
    SHARED.append(shared)
    stack = [shared, ByShared(), ByShared()]
    layer = tfgpipe.PipelinedLayer(stack, num_stages=3, num_microbatches=2)
    x = tf.constant(np.arange(8.0, dtype="float32").reshape(2, 4))
    with tf.GradientTape() as tape:
        y = layer(x, training=True)
    np.testing.assert_array_equal(y, x)
    gradient = tape.gradient(y, shared.kernel.value)
    np.testing.assert_allclose(
        gradient, 3 * np.broadcast_to(np.sum(x, 0)[:, None], (4, 4))
    )


def traces(monkeypatch):
    """Counts the stages that are traced from now on."""
    traced = []

    def counted(body, **arguments):
        traced.append(body)
        return original(body, **arguments)

    original = stage.trace_joint
    monkeypatch.setattr(stage, "trace_joint", counted)
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
    compare.assert_allclose(plain.gradients, pipelined.gradients, rtol=1e-5, atol=1e-6)
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
