"""Masks on a model's outputs are those of plain Keras, whatever its layers do."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tfgpipe._compat import keras_internals

layers = keras.layers
LENGTH, IDS = 6, 10
X = np.random.default_rng(0).integers(0, IDS, (8, LENGTH))
Y = np.random.default_rng(1).normal(size=(8, LENGTH, 3)).astype("float32")


class MasksInTraining(layers.Layer):
    """Leaves the first places out, in training alone."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x, training=None, mask=None):
        y = tf.identity(x)
        if training:
            later = tf.broadcast_to(tf.range(LENGTH) > 2, tf.shape(x)[:2])
            mask = later if mask is None else mask & later
        keras_internals.calls.set_mask(y, mask)
        return y


class ReadsAnother(layers.Layer):
    """Multiplies with a weight of a layer that is not in the model."""

    def __init__(self, read, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.read = read

    def call(self, x):
        return x @ self.read()


def scores(*middle: layers.Layer, mask_zero: bool = True) -> keras.Model:
    x = inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(IDS, 4, mask_zero=mask_zero)(x)
    for layer in middle:
        x = layer(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def assert_fits_as_plain_keras(make, **arguments) -> None:
    """Trains two steps and evaluates, with what is masked out of the loss."""
    arguments = {"num_stages": 2, "num_microbatches": 2, **arguments}
    plain, model = compare.model_pair(make, **arguments)
    for each in (plain, model):
        each.compile(keras.optimizers.SGD(0.5), "mse")
    fitted, expected = (
        each.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history["loss"]
        for each in (model, plain)
    )
    np.testing.assert_allclose(fitted, expected, rtol=1e-5)
    evaluated, expected = (
        each.evaluate(X, Y, batch_size=4, verbose=0) for each in (model, plain)
    )
    np.testing.assert_allclose(evaluated, expected, rtol=1e-5)


def test_masks_may_be_others_in_training_than_in_evaluation():
    assert_fits_as_plain_keras(lambda: scores(MasksInTraining()))


def test_a_layer_may_read_a_weight_that_no_layer_of_the_model_has():
    other = layers.Dense(4)
    other.build((None, 4))
    assert_fits_as_plain_keras(lambda: scores(ReadsAnother(lambda: other.kernel)))


@pytest.mark.filterwarnings("ignore:Batch normalization sees")
def test_a_batch_normalization_before_a_mask_may_be_synchronized():
    """With one microbatch a replica all are normalized as one batch."""
    compare.fresh_names()

    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        norm = layers.BatchNormalization(synchronized=True)
        return scores(norm, MasksInTraining(), mask_zero=False)

    plain = make()
    with tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2).scope():
        model = tfgpipe.pipeline(make(), num_microbatches=1)
        model.compile("sgd", "mse")
    plain.compile("sgd", "mse")
    fitted, expected = (
        each.fit(X, Y, batch_size=8, shuffle=False, epochs=2, verbose=0).history["loss"]
        for each in (model, plain)
    )
    np.testing.assert_allclose(fitted, expected, rtol=1e-5)


def test_alike_stages_may_take_masks_off_their_inputs():
    """Keras' attention does so with the masks of what it is given."""

    def make() -> keras.Model:
        x = inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(IDS, 4, mask_zero=True)(x)
        for _ in range(3):
            h = layers.MultiHeadAttention(2, 2)(x, x)
            x = layers.Masking()(layers.Add()([x, h]))
        return keras.Model(inputs, layers.Dense(3)(x))

    # The embedding, then a stage for each block; the last has the scores too.
    assert_fits_as_plain_keras(make, partition=[1, 3, 3, 4], num_stages=4)
