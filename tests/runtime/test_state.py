"""Dropout and batch statistics, microbatch by microbatch.

The reference is the plain Keras model run on the microbatches one after another, by
Keras itself: its seeds and moving averages then advance exactly as a pipeline's should.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.layer_stacks import REMAT_MODES, STACKS
from tests.helpers.marks import nightly
from tests.helpers.reference import OneAfterAnother


@pytest.mark.parametrize(
    ("name", "remat", "rows", "num_microbatches"),
    nightly(
        [
            (name, remat, *((8, 4), (7, 3), (5, 8))[(i + j) % 3])
            for i, name in enumerate(["dropped", "normalised", "regularised"])
            for j, remat in enumerate(REMAT_MODES)
        ],
        gate=[
            ("dropped", "stage", 8, 4),
            ("normalised", "none", 7, 3),
            ("regularised", "except_last", 5, 8),
            ("dropped", "layer", 7, 3),
        ],
    ),
)
def test_state_advances_as_when_microbatches_come_one_by_one(
    name, rows, num_microbatches, remat
):
    chosen = STACKS[name]
    plain, pipelined = compare.pair(
        chosen.make,
        chosen.shape,
        chosen.dtype,
        num_stages=3,
        num_microbatches=num_microbatches,
        remat=remat,
    )
    x = chosen.data(rows)
    reference = OneAfterAnother(plain, num_microbatches)
    # Twice, so that the second step starts from a state that the first one left.
    compare.assert_runs_the_same(reference, pipelined, x, times=2)


@pytest.mark.parametrize("remat", ["stage", "except_last", *nightly(["layer", "none"])])
def test_an_unknown_batch_size_leaves_the_same_state(remat):
    chosen = STACKS["normalised"]
    plain, pipelined = compare.pair(
        chosen.make,
        chosen.shape,
        chosen.dtype,
        num_stages=2,
        num_microbatches=4,
        remat=remat,
    )
    # Three rows for four microbatches: one is empty, and must not touch the averages.
    x = chosen.data(3)
    specs = [tf.TensorSpec([None, *chosen.shape], chosen.dtype)]
    compare.assert_runs_the_same(OneAfterAnother(plain, 4), pipelined, x, specs=specs)


def ones_dropped(num_microbatches: int, seed: int = 5) -> np.ndarray:
    """Returns which of 4 x 50 ones a dropout in the second stage kept."""
    layer = tfgpipe.PipelinedLayer(
        [keras.layers.Activation("linear"), keras.layers.Dropout(0.5, seed=seed)],
        num_stages=2,
        num_microbatches=num_microbatches,
    )
    return layer(tf.ones((4, 50)), training=True).numpy() != 0


def test_microbatches_draw_different_masks():
    kept = ones_dropped(4)
    assert len(np.unique(kept, axis=0)) == 4


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    np.testing.assert_array_equal(ones_dropped(4), ones_dropped(4))
    assert (ones_dropped(4) != ones_dropped(4, seed=6)).any()


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_the_gradient_flows_through_the_mask_that_the_output_shows(remat):
    layer = tfgpipe.PipelinedLayer(
        [keras.layers.Activation("linear"), keras.layers.Dropout(0.5, seed=5)],
        num_stages=2,
        num_microbatches=4,
        remat=remat,
    )
    x = tf.ones((8, 50))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
    np.testing.assert_array_equal(tape.gradient(y, x).numpy(), y.numpy())


def test_a_stateful_draw_is_not_repeated_by_the_recomputation():
    """`tf.random` has hidden state; what the forward drew is kept instead."""

    class Noise(keras.layers.Layer):
        def call(self, x):
            return x * tf.random.normal(tf.shape(x))

    layer = tfgpipe.PipelinedLayer(
        [Noise(), keras.layers.Activation("linear")], num_stages=2, num_microbatches=2
    )
    x = tf.ones((4, 3))

    @tf.function
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, x)

    y, gradient = run(x)
    np.testing.assert_array_equal(gradient.numpy(), y.numpy())


@pytest.mark.parametrize("remat", ["stage", "layer"])
def test_a_variable_that_no_layer_owns_cannot_be_assigned(remat):
    class Unseeded(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x))

    layer = tfgpipe.PipelinedLayer(
        [Unseeded(), keras.layers.Dense(2)],
        num_stages=2,
        num_microbatches=2,
        remat=remat,
    )
    words = r"received '.*seed_generator_state'.*keras.random.SeedGenerator"
    with pytest.raises(ValueError, match=words):
        layer(tf.ones((4, 3)), training=True)


def test_freezing_a_layer_without_weights_of_its_own_is_noticed():
    norm = keras.layers.BatchNormalization(center=False, scale=False)
    layer = tfgpipe.PipelinedLayer(
        [keras.layers.Activation("linear"), norm], num_stages=2, num_microbatches=2
    )
    x = 1.0 + tf.random.normal((8, 3))
    layer(x, training=True)
    moved = norm.moving_mean.numpy()
    assert moved.any()
    norm.trainable = False
    layer(x, training=True)
    np.testing.assert_array_equal(norm.moving_mean.numpy(), moved)


def two_models_of_one_norm():
    norm = keras.layers.BatchNormalization(name="shared")
    return [keras.Sequential([norm], name="one"), keras.Sequential([norm], name="two")]


def test_statistics_are_kept_in_one_stage_or_refused_when_the_layer_is_built():
    layer = tfgpipe.PipelinedLayer(
        two_models_of_one_norm(), num_stages=2, num_microbatches=2
    )
    words = (
        r"at most 1 stages can be made\. All calls that use '.*shared/moving_mean', "
        r"which a step changes, are in one stage: 'one' to 'two'\."
    )
    with pytest.raises(ValueError, match=words):
        layer.build((None, 3))


@pytest.mark.filterwarnings("ignore:Batch normalization sees one microbatch")
def test_statistics_that_a_given_cut_shares_are_refused_once_a_step_changes_them():
    layer = tfgpipe.PipelinedLayer(
        two_models_of_one_norm(), partition=[1, 1], num_microbatches=2
    )
    x = tf.ones((4, 3))
    layer(x, training=False)
    with pytest.raises(ValueError, match=r"shared/moving_mean' in stages \[0, 1\]"):
        layer(x, training=True)


@pytest.mark.filterwarnings("ignore:Batch normalization sees one microbatch")
def test_prediction_and_evaluation_drop_nothing_and_move_nothing():
    layers = [keras.layers.Dropout(0.5, seed=3), keras.layers.BatchNormalization()]
    plain = keras.Sequential([keras.Input((4,)), *layers])
    pipelined = tfgpipe.pipeline(plain, num_stages=2, num_microbatches=3)
    x = np.arange(28, dtype="float32").reshape(7, 4)
    for model in (plain, pipelined):
        model.compile("sgd", "mse")
    before = compare.values(pipelined)
    expected = np.float64(x) / np.sqrt(1.001)
    np.testing.assert_allclose(pipelined.predict(x, verbose=0), expected, rtol=1e-6)
    loss = pipelined.evaluate(x, x - 1, batch_size=7, verbose=0)
    np.testing.assert_allclose(loss, np.mean((expected - x + 1) ** 2), rtol=1e-5)
    compare.assert_equal(compare.values(pipelined), before)
