"""The traces that a stage keeps."""

from __future__ import annotations

import gc
import weakref

import keras
import pytest
import tensorflow as tf

from tests.helpers import compare
from tfgpipe.stage import stage


class Replaceable(keras.layers.Layer):
    """A layer that makes its weight anew, as quantization does."""

    def build(self, input_shape):
        del input_shape
        self.renew(1.0)

    def renew(self, value):
        self._tracker.unlock()
        self._trainable_variables.clear()
        self.w = self.add_weight(shape=(), initializer=lambda *_, **__: value)

    def call(self, x):
        return x * self.w


def test_variables_by_whose_ids_traces_are_found_live_as_long():
    """Another variable may get the id of one that is gone, and with it its trace."""
    model = compare.pipelined_model(
        lambda: [Replaceable()], (2,), "float32", num_stages=1, num_microbatches=2
    )
    (layer,) = model.layers[-1].layers
    x = tf.ones((4, 2))
    assert model(x)[0, 0] == 1
    old = weakref.ref(layer.w)
    layer.renew(2.0)
    gc.collect()
    assert model(x)[0, 0] == 2
    assert old() is not None


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (tf.TensorSpec([3, 5, 4]), [None, 5, 4]),
        (tf.TensorSpec([3, 6, 4]), [None, None, 4]),
        # Features, of which layers want the number that they were built for.
        (tf.TensorSpec([3, 5, 6]), [2, 5, 4]),
        (tf.TensorSpec([3, 5]), [2, 5, 4]),
        (tf.TensorSpec([3, 5, 4], tf.float16), [2, 5, 4]),
    ],
)
def test_sizes_that_differ_are_left_open_but_those_of_features(other, expected):
    (found,) = stage._relax_sizes((tf.TensorSpec([2, 5, 4]),), (other,))
    assert found == tf.TensorSpec(expected)


def test_numbers_of_tokens_and_one_size_for_each_example_are_left_open():
    a = tf.TensorSpec([2, 5], tf.int32), tf.TensorSpec([2])
    b = tf.TensorSpec([3, 6], tf.int32), tf.TensorSpec([3])
    tokens, weights = stage._relax_sizes(a, b)
    assert tokens == tf.TensorSpec([None, None], tf.int32)
    assert weights == tf.TensorSpec([None])
