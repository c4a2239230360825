"""The contract of calls of layers of Keras."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.helpers.versions import MOVED
from tfgpipe._compat import keras_internals


def test_reading_without_autocast_gives_the_stored_dtype():
    class Reads(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(2,))

        def call(self, x):
            seen.append(self.w.value.dtype)
            with keras_internals.calls.without_autocast():
                seen.append(self.w.value.dtype)
            return x

    seen = []
    Reads(dtype="mixed_bfloat16")(tf.ones((1, 2)))
    assert seen == [tf.bfloat16, tf.float32], MOVED


def test_masks_ride_on_tensors():
    masked = keras.layers.Embedding(5, 2, mask_zero=True)(tf.constant([[1, 0]]))
    assert keras_internals.calls.get_mask(masked).numpy().tolist() == [[True, False]], (
        MOVED
    )
    plain = tf.ones((1, 2, 2))
    assert keras_internals.calls.get_mask(plain) is None
    keras_internals.calls.set_mask(plain, keras_internals.calls.get_mask(masked))
    output = keras.layers.LSTM(3, return_sequences=True)(plain)
    assert keras_internals.calls.get_mask(output) is not None, MOVED


def test_the_scope_is_found_and_takes_updates():
    variable = keras.Variable(1.0)
    with keras.StatelessScope() as scope:
        assert keras_internals.calls.current_stateless_scope() is scope, MOVED
        variable.assign(2.0)
        assert scope.state_mapping, MOVED
    assert scope.get_current_value(variable).numpy() == 2.0
    assert keras_internals.calls.current_stateless_scope() is None


def test_the_optimizer_of_the_model_being_called_is_found():
    class Looks(keras.layers.Layer):
        def call(self, x):
            found.append(keras_internals.calls.calling_optimizer())
            return x

    found = []
    inner = keras.Sequential([Looks()])
    model = keras.Sequential([keras.Input((2,)), inner])
    model(tf.ones((1, 2)))
    model.compile("sgd", "mse")
    model(tf.ones((1, 2)))
    assert found[-2:] == [None, model.optimizer], MOVED
    assert keras_internals.calls.calling_optimizer() is None, MOVED


def test_a_call_that_only_finds_shapes_is_recognised():
    class Looks(keras.layers.Layer):
        def call(self, x):
            found.append(keras_internals.calls.is_symbolic_call())
            return x

    found = []
    layer = Looks()
    layer(keras.Input((2,)))
    tf.function(layer)(tf.ones((1, 2)))
    layer(tf.ones((1, 2)))
    assert found == [True, False, False], MOVED
