"""Gradients through a call of the layer that the pairs of `test_identity` leave out."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import compare
from tests.helpers.layer_stacks import REMAT_MODES, STACKS


@pytest.mark.parametrize(
    ("name", "remat"), list(zip(STACKS, itertools.cycle(REMAT_MODES), strict=False))
)
def test_inference_is_the_plain_models_and_differentiable(name, remat):
    chosen = STACKS[name]
    plain, pipelined = compare.pair(
        chosen.make,
        chosen.shape,
        chosen.dtype,
        num_stages=3,
        num_microbatches=4,
        remat=remat,
    )
    x = chosen.data(8)
    compare.assert_runs_the_same(plain, pipelined, x, training=False)


@pytest.mark.parametrize("remat", ["layer", "none"])
def test_xla_compiled_stages_give_the_same(remat):
    chosen = STACKS["blocks"]
    plain, pipelined = compare.pair(
        chosen.make,
        chosen.shape,
        chosen.dtype,
        num_stages=2,
        num_microbatches=2,
        remat=remat,
        jit_compile=True,
    )
    x = chosen.data(8)
    compare.assert_runs_the_same(plain, pipelined, x)


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_layers_that_share_weights_across_stages(remat):
    class Wraps(keras.layers.Layer):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def build(self, shape):
            if not self.inner.built:
                self.inner.build(shape)

        def call(self, x):
            return keras.ops.tanh(self.inner(x))

    def make():
        shared = keras.layers.Dense(5)
        return [Wraps(shared), keras.layers.Dense(5), Wraps(shared)]

    arguments = {"num_stages": 3, "num_microbatches": 2, "remat": remat}
    plain, pipelined = compare.pair(make, (5,), "float32", **arguments)
    x = STACKS["dense"].data(6)
    compare.assert_runs_the_same(plain, pipelined, x)


@pytest.mark.parametrize(("remat", "rows"), [("layer", 2), ("except_last", 5)])
def test_lengths_unknown_until_run_time(remat, rows):
    def make():
        return [
            keras.layers.Dense(4),
            keras.layers.Conv1D(3, 2, padding="causal"),
            keras.layers.LSTM(3, return_sequences=True),
        ]

    arguments = {"num_stages": 3, "num_microbatches": 4, "remat": remat}
    plain, pipelined = compare.pair(make, (None, 3), "float32", **arguments)
    specs = [tf.TensorSpec([None, None, 3])]
    x = np.random.default_rng(0).standard_normal((rows, 7, 3), dtype=np.float32)
    compare.assert_runs_the_same(plain, pipelined, x, specs=specs)


@pytest.mark.parametrize("wrapper", ["float32", "float64"])
def test_double_precision_layers_stay_double(wrapper):
    def make():
        return [keras.layers.Dense(4, dtype="float64") for _ in range(3)]

    arguments = {"num_stages": 3, "num_microbatches": 2, "dtype": wrapper}
    plain, pipelined = compare.pair(make, (5,), "float64", **arguments)
    x = np.random.default_rng(0).standard_normal((6, 5))
    compare.assert_runs_the_same(plain, pipelined, x, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("units", [3, 64])  # Kernels of 64 are summed at the end.
def test_a_gradient_called_twice_is_the_same_twice(units):
    """A second gradient runs the forwards again, of the same variables and seeds."""

    def make():
        dense = [keras.layers.Dense(units) for _ in range(2)]
        return [dense[0], keras.layers.Dropout(0.5, seed=1), dense[1]]

    model = compare.pipelined_model(
        make, (units,), "float32", num_stages=2, num_microbatches=4
    )
    x = keras.random.normal((8, units))
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(model(x, training=True) ** 2)
    first = [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]
    assert all(map(np.any, first))
    model.trainable_variables[0].assign_add(tf.ones_like(model.weights[0]))
    second = tape.gradient(loss, model.trainable_variables)
    compare.assert_equal(first, second)


def test_what_is_trainable_may_change_before_the_gradient_is_taken():
    model = compare.pipelined_model(
        STACKS["dense"].make, STACKS["dense"].shape, "float32",
        num_stages=2, num_microbatches=4,
    )  # fmt: skip
    x = tf.constant(STACKS["dense"].data(8))
    weights = model.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(model(x, training=True) ** 2)
    expected = tape.gradient(loss, weights)
    model.layers[-1].layers[0].trainable = False
    compare.assert_equal(expected, tape.gradient(loss, weights))


def test_a_gradient_taken_outside_the_tf_function_of_the_forward_pass():
    chosen = STACKS["dense"]
    plain = compare.plain_model(chosen.make, chosen.shape, chosen.dtype)
    model = compare.pipelined_model(
        chosen.make, chosen.shape, chosen.dtype, num_stages=2, num_microbatches=4
    )
    compare.copy_state(plain, model)
    x = tf.constant(chosen.data(8))

    def gradients(model: keras.Model) -> list[tf.Tensor]:
        forward = tf.function(lambda x: model(x, training=True))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(forward(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    compare.assert_close(gradients(plain), gradients(model))
