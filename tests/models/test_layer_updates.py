"""What layers do besides returning outputs: assign weights, update metrics, add losses.

Each is compared with the plain Keras model on the whole mini-batch.
"""

from __future__ import annotations

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare

ops, layers = keras.ops, keras.layers
# Neither 2, 3 nor 4 microbatches are of equal size.
X = np.random.default_rng(0).normal(size=(7, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(7, 2)).astype("float32")


class Clipped(layers.Layer):
    """Uses a weight, clips it, uses it again; another one decays."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5), name="kernel")
        self.bias = self.add_weight(shape=(5,), name="bias")

    def call(self, x):
        before = ops.matmul(x, self.kernel)
        self.kernel.assign(ops.clip(self.kernel, -0.3, 0.3))
        self.bias.assign(0.9 * self.bias + 0.1)
        return ops.tanh(before + ops.matmul(x, self.kernel) + self.bias)


class Drifting(layers.Layer):
    """Assigns by its inputs: a weight, and an average that it subtracts."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], name="scale")
        self.average = self.add_weight(
            shape=shape[-1:], name="average", trainable=False
        )

    def call(self, x):
        for variable in (self.scale, self.average):
            variable.assign(0.9 * variable + 0.1 * ops.mean(x, axis=0))
        return x * self.scale - self.average


class Measured(layers.Layer):
    """Has a metric of its own."""

    def __init__(self, name):
        super().__init__(name=name)
        self.activity = keras.metrics.Mean(name=f"{name}_activity")

    def call(self, x):
        self.activity.update_state(ops.mean(ops.square(x), axis=-1))
        return x


class Outer(layers.Layer):
    """Has a layer with a metric inside."""

    def __init__(self):
        super().__init__()
        self.inner = Measured("inner")

    def call(self, x):
        return self.inner(2.0 * x)


class Losses(layers.Layer):
    """Adds means and sums over examples, with and without an axis of examples."""

    def call(self, x):
        square = 0.1 * ops.square(x)
        self.add_loss(ops.mean(square))
        self.add_loss(ops.sum(square))
        self.add_loss(ops.sum(square, axis=-1))
        self.add_loss(ops.mean(square, axis=0))
        self.add_loss(square / ops.cast(ops.shape(x)[0], x.dtype))
        return x


class CTC(layers.Layer):
    """The loss of Keras' example for captchas, one value for each example."""

    def call(self, x):
        rows = ops.shape(x)[0]
        labels, lengths = ops.ones((rows, 1), "int32"), ops.ones((rows,), "int32")
        scores = ops.reshape(x, (-1, 2, 3))
        loss = ops.ctc_loss(labels, scores, lengths, 2 * lengths, mask_index=0)
        self.add_loss(loss[:, None])
        return x


class Averaged(layers.Layer):
    """Keeps an average of its weight, by a number that warms up."""

    def build(self, shape):
        size = shape[-1]
        self.kernel = self.add_weight(shape=(size, size), name="kernel")
        self.average = self.add_weight(
            shape=(size, size), trainable=False, name="average"
        )
        self.warmed = self.add_weight(shape=(), trainable=False, name="warmed")

    def call(self, x):
        self.warmed.assign(0.5 * self.warmed + 0.5)
        self.average.assign(0.9 * self.average + 0.1 * self.warmed * self.kernel)
        return x @ (self.kernel + self.average)


def everything():
    spectral = layers.SpectralNormalization(layers.Dense(8, activation="tanh"))
    frozen = layers.SpectralNormalization(layers.Dense(8))
    frozen.trainable = False
    some = [Clipped(), Measured("first"), Outer(), Averaged(), Losses()]
    return [spectral, frozen, *some]


def drifting():
    return [Drifting(name="drifting")]


def make(between):
    keras.utils.set_random_seed(1)
    stack = [keras.Input((6,)), layers.Dense(6), *between(), layers.Dense(2)]
    model = keras.Sequential(stack)
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def trained(model, *, eager=False):
    """Returns losses, metrics, predictions and variables of three steps."""
    model.run_eagerly = eager
    fitted = model.fit(
        X, Y, batch_size=7, epochs=3, shuffle=False, verbose=0, validation_data=(X, Y)
    )
    variables = [v.numpy() for v in model.variables]
    names = sorted(fitted.history)
    predicted = model.predict(X, verbose=0)
    return names, [*(fitted.history[n] for n in names), predicted, *variables]


@pytest.fixture(scope="module")
def plain():
    """Returns what plain models of these layers give, each trained once."""
    known = {}

    def of(between):
        if between not in known:
            known[between] = trained(make(between))
        return known[between]

    return of


def assert_same(expected, received):
    assert expected[0] == received[0]
    compare.assert_close(expected[1], received[1], 1e-5, 1e-5)


def pipelined(between, *, kind, num_replicas=1, **arguments):
    """Returns a pipeline, and the scope to make it in."""
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=num_replicas)
    scope = strategy.scope() if num_replicas > 1 else contextlib.nullcontext()
    with scope:
        model = make(between)
        if kind == "model":
            return tfgpipe.pipeline(model, **arguments)
        inputs = keras.Input((6,))
        layer = tfgpipe.PipelinedLayer(model, **arguments)
        whole = keras.Model(inputs, layer(inputs))
        whole.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return whole


CASES = {
    "layer": {"kind": "layer", "num_stages": 2, "num_microbatches": 3},
    "1f1b": {
        "kind": "model",
        "num_stages": 3,
        "num_microbatches": 4,
        "schedule": "1f1b",
        "remat": "layer",
    },
    "zero_bubble": {
        "kind": "model",
        "num_stages": 2,
        "num_microbatches": 3,
        "schedule": "zero_bubble",
        "remat": "none",
    },
    "replicas": {
        "kind": "model",
        "num_stages": 2,
        "num_microbatches": 2,
        "num_replicas": 2,
    },
}


def test_results_are_as_many_as_those_of_the_plain_model():
    """A layer's metric is among them once for each layer that it is inside."""
    expected = make(everything).train_on_batch(X, Y)
    model = tfgpipe.pipeline(make(everything), num_stages=2, num_microbatches=3)
    received = model.train_on_batch(X, Y)
    assert len(received) == len(expected)
    np.testing.assert_allclose(received, expected, rtol=1e-5)
    assert [m.name for m in model.metrics] == [m.name for m in make(everything).metrics]


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_the_plain_model(case, plain):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        received = trained(pipelined(everything, **CASES[case]), eager=case == "layer")
    assert_same(plain(everything), received)


@pytest.mark.nightly
def test_what_depends_on_the_inputs_is_assigned_as_with_one_microbatch(plain):
    for remat in ("stage", "layer"):
        model = tfgpipe.pipeline(
            make(drifting), num_stages=2, num_microbatches=1, remat=remat
        )
        assert_same(plain(drifting), trained(model))


@pytest.mark.filterwarnings("ignore:Layer 'drifting")
def test_a_weight_that_each_microbatch_assigns_anew_is_named():
    model = tfgpipe.pipeline(make(drifting), num_stages=2, num_microbatches=2)
    with pytest.warns(UserWarning, match=r"Received '.*drifting/scale', '.*/average'"):
        model.train_on_batch(X, Y)


# Of two replicas the second has no rows at all.
@pytest.mark.nightly
@pytest.mark.parametrize(("num_replicas", "rows"), [(1, 2), (2, 1)])
def test_a_microbatch_without_rows_assigns_nothing_and_adds_nothing(num_replicas, rows):
    plain_model = make(everything)
    model = pipelined(
        everything,
        kind="model",
        num_replicas=num_replicas,
        num_stages=2,
        num_microbatches=4,
    )
    unsized = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(rows)
    logs = [
        each.fit(unsized, shuffle=False, verbose=0).history
        for each in (plain_model, model)
    ]
    for name, (value,) in logs[0].items():
        np.testing.assert_allclose(logs[1][name], [value], rtol=1e-5, err_msg=name)
    strategy = model.distribute_strategy
    for a, b in zip(plain_model.variables, model.variables, strict=True):
        compare.close(a.numpy(), b.numpy(), a.path, 1e-5, 1e-5)
        # A metric is the sum of its copies.
        if b.aggregation == "none":
            for copy in strategy.experimental_local_results(b.value):
                compare.close(a.numpy(), copy.numpy(), a.path, 1e-5, 1e-5)


def test_a_loss_of_each_example_needs_no_probe():
    def ctc():
        return [CTC(name="ctc")]

    model = tfgpipe.pipeline(make(ctc), num_stages=2, num_microbatches=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        received = model.train_on_batch(X, Y)
    np.testing.assert_allclose(received, make(ctc).train_on_batch(X, Y), rtol=1e-5)


class Strict(layers.Layer):
    """Runs on zeros and ones alone, which no probe draws, and adds losses."""

    def call(self, x):
        def checked(x):
            assert np.all(x * x == x)
            return x

        x = tf.ensure_shape(tf.numpy_function(checked, [x], x.dtype), x.shape)
        self.add_loss(ops.sum(ops.square(x - 0.3), axis=-1))
        return x


def test_a_loss_of_each_example_counts_where_the_layer_cannot_be_probed():
    def made():
        keras.utils.set_random_seed(1)
        stack = [keras.Input((6,)), Strict(name="strict"), layers.Dense(2)]
        model = keras.Sequential(stack)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    x = (X > 0).astype("float32")
    with pytest.warns(UserWarning, match="treats the examples of a batch .*'strict'"):
        model = tfgpipe.pipeline(made(), num_stages=2, num_microbatches=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        received = model.train_on_batch(x, Y)
    np.testing.assert_allclose(received, made().train_on_batch(x, Y), rtol=1e-5)
