"""The contract of attributes that are replaced for a while."""

from __future__ import annotations

import contextlib
import threading

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers.versions import MOVED
from tfgpipe._compat import keras_internals, tf_internals


def test_a_variable_is_shown_as_one_of_its_copies():
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
    copies = strategy.experimental_local_results(variable.value)
    with (
        tf_internals.without_strategy(),
        keras_internals.substitution.swap_values([(variable, copies[1])]),
    ):
        variable.assign_add([1.0, 1.0])
        assert variable.numpy().tolist() == [2.0, 3.0], MOVED
    assert copies[0].numpy().tolist() == [1.0, 2.0], MOVED
    assert copies[1].numpy().tolist() == [2.0, 3.0], MOVED


def test_two_threads_take_a_layer_for_a_subclass_one_after_the_other():
    class Other(keras.layers.Dense):
        pass

    layer = keras.layers.Dense(2)
    entered = threading.Event()
    seen = []

    def class_of(layer):
        seen.append(type(layer))
        return Other

    def enter():
        with keras_internals.substitution.as_subclasses([layer], class_of):
            entered.set()

    thread = threading.Thread(target=enter)
    with keras_internals.substitution.as_subclasses([layer], class_of):
        thread.start()
        assert not entered.wait(0.2)
    thread.join(10)
    assert entered.is_set()
    assert seen == [keras.layers.Dense] * 2
    assert type(layer) is keras.layers.Dense


def test_a_layer_is_of_a_subclass_for_a_while():
    class Doubled(keras.layers.Dense):
        def call(self, inputs, training=None):
            return 2 * super().call(inputs)

    layer = keras.layers.Dense(2)
    x = np.ones((1, 3), "float32")
    plain = layer(x)
    outer = keras.Sequential([layer])
    with keras_internals.substitution.as_subclasses([layer], lambda _: Doubled):
        assert isinstance(layer, Doubled), MOVED
        np.testing.assert_array_equal(outer(x), 2 * plain, MOVED)
    assert type(layer) is keras.layers.Dense
    np.testing.assert_array_equal(outer(x), plain, MOVED)


def test_attributes_are_those_of_before_after_an_error():
    layer = keras.layers.Dense(2, name="before")
    attributes = [
        (layer, "name", lambda name: f"{name}, inside"),
        (layer, "name", lambda name: f"{name}, twice"),
        (layer, "units", lambda _: 1 / 0),
    ]

    @keras_internals.substitution.substitute(*attributes[:2])
    def fail():
        assert layer.name == "before, inside, twice"
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    with (
        pytest.raises(ZeroDivisionError),
        keras_internals.substitution.substitute(*attributes),
    ):
        pass
    assert (layer.name, layer.units) == ("before", 2)


@pytest.mark.parametrize("in_scope", [False, True])
def test_variables_read_as_other_values_in_one_thread(in_scope):
    dense, counter = keras.layers.Dense(2), keras.Variable(0.0)
    x = np.ones((1, 3), "float32")
    expected = [dense(x), 2 * dense(x)]

    @keras_internals.substitution.read_as(dense, [(dense.kernel, 2 * dense.kernel)])
    def inside():
        thread = threading.Thread(target=lambda: seen.append(dense(x)))
        thread.start(), thread.join()
        seen.append(dense(x))
        counter.assign(1.0)

    seen = []
    with keras.StatelessScope() if in_scope else contextlib.nullcontext() as scope:
        inside()
        value = scope.get_current_value(counter) if in_scope else None
        seen.append(dense(x))
    for a, b in zip([*expected, expected[0]], seen, strict=True):
        np.testing.assert_array_equal(b, a, MOVED)
    assert not in_scope or float(value) == 1.0


def test_an_attribute_is_another_while_any_thread_is_inside():
    layer = keras.layers.Dense(2, activation="relu")
    before = layer.activation
    shared = keras_internals.substitution.SharedSubstitution(layer, "activation", abs)
    entered, leave = threading.Event(), threading.Event()

    def enter():
        with shared:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=enter)
    with shared:
        thread.start()
        assert entered.wait(10)
    assert layer.activation is abs
    leave.set()
    thread.join(10)
    assert layer.activation is before
