"""The contract of variables of Keras."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tests.helpers.versions import MOVED
from tfgpipe._compat import keras_internals


def on(device):
    return lambda: tf.device(device)


def test_an_uninitialised_variable_comes_to_life_inside_the_scope():
    layer = keras.layers.Dense(3)
    with keras.StatelessScope():
        layer.build((None, 2))
        keras_internals.variables.initialize_in_scope(layer.kernel, on("CPU:3"), None)
    assert layer.kernel.value.device.endswith("CPU:3"), MOVED
    assert layer.bias.value.device.endswith("CPU:0"), MOVED


class Failing(keras.layers.Layer):
    """A layer whose weight cannot be created until it is told otherwise."""

    fails = True

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(2,), initializer=self.draw)

    def draw(self, shape, dtype=None):
        if self.fails:
            raise MemoryError("out of memory")
        return tf.ones(shape, dtype)

    def call(self, x):
        return x * self.kernel


@pytest.mark.parametrize("place", [True, False])
def test_after_a_build_that_fails_keras_creates_nothing_more(place, monkeypatch):
    layers = [keras.layers.Dense(2), Failing(), keras.layers.Dense(2)]

    @keras_internals.variables.build_scope()
    def build():
        for layer in layers:
            layer.build((None, 2))
            if place:
                for v in layer.variables:
                    keras_internals.variables.initialize_in_scope(v, on("CPU:3"), None)

    with pytest.raises(MemoryError):
        build()
    with keras.StatelessScope():  # Would fail at the first variable of the scope above.
        pass
    monkeypatch.setattr(Failing, "fails", False)
    variables = [v for layer in layers for v in layer.variables]
    with keras_internals.variables.build_scope():
        for v in variables:
            keras_internals.variables.initialize_in_scope(v, on("CPU:3"), None)
    assert all(v.value.device.endswith("CPU:3") for v in variables), MOVED


def test_the_first_error_of_a_build_is_raised():
    @keras_internals.variables.build_scope()
    def build():
        Failing().build((None, 2))
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        build()


def test_an_initialised_variable_moves_with_its_value():
    variable = keras.Variable([1.0, 2.0])
    keras_internals.variables.initialize_in_scope(variable, on("CPU:2"), None)
    assert variable.value.device.endswith("CPU:2"), MOVED
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_a_variable_that_moved_is_the_old_one_after_an_error():
    variable = keras.Variable([1.0, 2.0])
    old = variable.value

    @keras_internals.variables.unmoved_on_error([variable])
    def move():
        keras_internals.variables.initialize_in_scope(variable, on("CPU:2"), None)
        assert variable.value is not old
        raise MemoryError

    with pytest.raises(MemoryError):
        move()
    assert variable.value is old, MOVED


def test_a_variable_has_no_value_in_the_scope_it_was_made_in():
    layer = keras.layers.Dense(2)
    with keras.StatelessScope():
        layer.build((None, 2))
        assert not keras_internals.variables.is_initialized(layer.kernel), MOVED
    assert keras_internals.variables.is_initialized(layer.kernel), MOVED
