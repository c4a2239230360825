"""The contract of attention layers that are called on new positions."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.versions import MOVED, WINDOW
from tfgpipe._compat import keras_internals

WIDTH, LENGTH, INDEX = 8, 6, 3


def multi_head():
    return keras.layers.MultiHeadAttention(2, 4, **WINDOW)


def grouped():
    return keras.layers.GroupQueryAttention(4, 4, 2)


@pytest.mark.parametrize(("make", "heads"), [(multi_head, 2), (grouped, 2)])
def test_keys_and_values_go_through_a_store(make, heads):
    layer, x = make(), tf.random.normal([1, LENGTH, WIDTH])
    expected = layer(x, x, use_causal_mask=True)
    assert keras_internals.attention.attention_layers(layer)[0] is layer, MOVED
    assert keras_internals.attention.key_value_shape(layer, WIDTH) == (heads, 4), MOVED
    stored = []

    def store(new):
        stored.append(new)
        return new

    before = type(layer)
    with keras_internals.attention.called_on_new_positions(layer, store, None, LENGTH):
        layer(x, x, use_causal_mask=True)
    assert [tuple(x.shape) for x in stored] == [(1, LENGTH, heads, 4)] * 2, MOVED
    keys_and_values = iter(stored)
    given = []

    def restore(new):
        given.append(new)
        return next(keys_and_values)

    new = x[:, INDEX : INDEX + 1]
    with keras_internals.attention.called_on_new_positions(
        layer, restore, tf.constant(INDEX), LENGTH
    ):
        actual = layer(new, new, use_causal_mask=True)
    np.testing.assert_allclose(actual[:, 0], expected[:, INDEX], atol=1e-6)
    for whole, one in zip(stored, given, strict=True):
        np.testing.assert_allclose(one[:, 0], whole[:, INDEX], atol=1e-6)
    assert type(layer) is before


def test_layers_that_take_a_start_index_get_the_position():
    class Places(keras.layers.Layer):
        def call(self, x, start_index=0):
            return x + keras.ops.cast(start_index, x.dtype)

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.places = Places()

        def call(self, x):
            return self.places(x)

    layer, x = Block(), tf.zeros([1, 1, WIDTH])
    with keras_internals.attention.called_on_new_positions(
        layer, None, tf.constant(INDEX), LENGTH
    ):
        assert np.all(layer(x) == INDEX), MOVED
    assert np.all(layer(x) == 0)


def test_a_layer_without_a_projection_of_keys_has_no_shape_of_them():
    with pytest.raises(ValueError, match="layer 'dense'"):
        keras_internals.attention.key_value_shape(
            keras.layers.Dense(2, name="dense"), WIDTH
        )
