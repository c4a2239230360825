"""The contract of variables in slices, and of Keras' optimizers on them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import compare
from tests.helpers.versions import MOVED
from tfgpipe._compat import keras_internals, sliced_variables

VALUES = np.arange(15.0, dtype="float32").reshape(5, 3)


def sliced(values=VALUES, sizes=(2, 3), axis=0):
    """Returns a variable in slices, one on each CPU."""
    parts = []
    for d, part in enumerate(np.split(values, np.cumsum(sizes)[:-1], axis)):
        with tf.device(f"CPU:{d}"):
            parts.append(tf.Variable(part))
    return sliced_variables.SlicedVariable(parts, axis)


def of_keras(**arguments):
    """Returns a Keras variable in slices."""
    variable = keras.Variable(VALUES)
    variable._value = sliced(**arguments)
    return variable


@pytest.mark.parametrize(("sizes", "axis"), [((2, 3), 0), ((1, 1, 1), 1)])
def test_it_is_read_and_assigned_as_the_whole(sizes, axis):
    variable = sliced(sizes=sizes, axis=axis)
    assert isinstance(variable, tf.Variable)
    assert (variable.shape, variable.sizes) == ((5, 3), sizes)
    for read in (
        variable.numpy(),
        np.asarray(variable),
        tf.identity(variable),
        variable + 0,
    ):
        np.testing.assert_array_equal(read, VALUES)
    variable.assign(2 * VALUES)
    variable.assign_sub(VALUES)
    variable.assign_add(VALUES)
    last = np.split(2 * VALUES, np.cumsum(sizes)[:-1], axis)[-1]
    np.testing.assert_array_equal(variable.slices[-1].numpy(), last)
    assert variable.slices[-1].device.endswith(f"CPU:{len(sizes) - 1}")


@pytest.mark.parametrize("traces", [False, True])
def test_its_gradient_is_that_of_the_whole(traces):
    variable = of_keras()

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(variable)) + tf.reduce_sum(variable)
        return tape.gradient(loss, variable)

    found = tf.function(gradient)() if traces else gradient()
    np.testing.assert_array_equal(found, 2 * VALUES + 1)


def test_a_function_gathers_it_where_it_is_read():
    variable = sliced()

    @tf.function
    def read():
        with tf.device("CPU:3"):
            return tf.identity(variable)

    (gather,) = [
        op for op in read.get_concrete_function().graph.get_operations()
        if op.type == "ConcatV2"
    ]  # fmt: skip
    assert gather.device.endswith("CPU:3"), MOVED
    np.testing.assert_array_equal(read(), VALUES)


def test_a_checkpoint_has_the_whole(tmp_path):
    path = tf.train.Checkpoint(v=of_keras()).write(str(tmp_path / "checkpoint"))
    other = of_keras(values=0 * VALUES, sizes=(4, 1))
    tf.train.Checkpoint(v=other).read(path).assert_consumed()
    np.testing.assert_array_equal(other.numpy(), VALUES)
    (name, *_) = [n for n, _ in tf.train.list_variables(path) if n.startswith("v/")]
    np.testing.assert_array_equal(tf.train.load_variable(path, name), VALUES)


def test_an_optimizer_has_slices_in_place_of_weights():
    class Adam(keras.optimizers.Adam):
        def add_variable_from_reference(self, reference_variable, **kwargs):
            slot = super().add_variable_from_reference(reference_variable, **kwargs)
            if keras_internals.variables.is_sliced(reference_variable):
                slot._value = sliced(slot.numpy())
            return slot

    optimizer = Adam(0.1, clipnorm=1.0, weight_decay=0.1)
    plain = keras.optimizers.Adam(0.1, clipnorm=1.0, weight_decay=0.1)
    weights = (
        [of_keras(), keras.Variable([1.0])],
        [
            keras.Variable(VALUES),
            keras.Variable([1.0]),
        ],
    )
    for each, variables in zip((optimizer, plain), weights, strict=True):
        each.exclude_from_weight_decay(var_list=[variables[0]])
        each.build(variables)
    assert not keras_internals.variables.is_sliced(weights[0][1])
    before = dict(vars(optimizer))
    parts = [keras_internals.variables.slices_of(v) for v in weights[0]]
    assert [len(some) for some in parts] == [2, 1]
    gradient = tf.constant(VALUES)
    for _ in range(2):
        with keras_internals.optimizers.by_slices(optimizer, [0, 0, 1]):
            grads = [gradient[:2], gradient[2:], [3.0]]
            optimizer.apply(grads, [*parts[0], *parts[1]])
        plain.apply([gradient, [3.0]], weights[1])
    assert vars(optimizer) == before, MOVED
    compare.assert_allclose(weights[0], weights[1], 1e-6, 1e-7)
    compare.assert_allclose(optimizer.variables, plain.variables, 1e-6, 1e-7)
    assert not np.allclose(weights[1][0].numpy(), VALUES)
