"""The contract of layers of Keras."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.helpers.versions import MOVED
from tfgpipe._compat import keras_internals


def test_a_wrapper_takes_the_arguments_of_the_layer_inside():
    class Scales(keras.layers.Layer):
        def call(self, x, by, mask=None, by_mask=None):
            seen.append((by_mask is not None, mask is not None))
            return x * by

    class Wrapper(keras.layers.Layer):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            keras_internals.layers.take_call_arguments_of(self, layer)

        def build(self, x_shape, by_shape):
            shapes.append((x_shape, by_shape))

        def call(self, *args, training=None, **kwargs):
            seen.append(training)
            return self.layer(*args, **kwargs)

    seen, shapes = [], []
    wrapper = Wrapper(Scales())
    by = tf.ones((2, 1))
    keras_internals.calls.set_mask(by, tf.constant([True, False]))
    y = wrapper(tf.ones((2, 3)), by=by, training=True)
    assert y.shape == (2, 3)
    assert shapes == [((2, 3), (2, 1))], MOVED
    assert seen == [True, (True, False)], MOVED
    expected = ["x", "by", "mask", "by_mask", "training"]
    assert wrapper.call_signature_parameters == expected, MOVED


def test_layers_of_keras_that_their_configuration_makes_are_known():
    reshape = keras.Model(x := keras.Input((4,)), keras.ops.reshape(x, (-1, 2)))
    complete = [
        keras.layers.Dense(2),
        keras.layers.LSTM(2),
        keras.layers.BatchNormalization(),
        reshape.layers[-1],
    ]
    assert all(map(keras_internals.layers.config_is_complete, complete)), MOVED
    others = [
        keras.layers.Lambda(lambda x: x),
        keras.layers.Normalization(),
        keras.Sequential([keras.layers.Dense(2)]),
    ]
    public = [getattr(keras.layers, name) for name in dir(keras.layers)]
    others += [
        object.__new__(kind)
        for kind in public
        if kind in (keras.layers.JaxLayer, keras.layers.TFSMLayer)
        or hasattr(kind, "adapt")
    ]
    assert not any(map(keras_internals.layers.config_is_complete, others)), MOVED


def test_names_of_inner_layers_are_found():
    block = keras.Sequential([keras.layers.Dense(2, name="inner")], name="outer")
    assert keras_internals.layers.inner_names(block) == ["outer", "inner"], MOVED
    operation = keras.ops.add(keras.Input((2,)), 1.0)._keras_history.operation
    assert keras_internals.layers.inner_names(operation) == ["add"], MOVED


def test_layers_inside_layers_are_found():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            lstm = keras.layers.LSTM(2)
            self.inner = [keras.layers.Dense(2), keras.layers.Bidirectional(lstm)]

    found = keras_internals.layers.inner_layers(block := Block())
    dense, both = block.inner
    expected = [block, dense, both, both.forward_layer, both.backward_layer]
    assert set(expected) <= set(found), MOVED
    assert found[0] is block, MOVED
    assert keras_internals.layers.inner_layers(keras.ops.add) == []
    dense.trainable = False
    trainable = dict(
        zip(found, keras_internals.layers.is_trainable(block), strict=True)
    )
    assert trainable[block], MOVED
    assert not trainable[dense], MOVED


def test_variables_that_a_step_may_change():
    norm = keras.layers.BatchNormalization()
    norm.build((None, 2))
    frozen = keras.layers.Dense(2)
    frozen.build((None, 2))
    frozen.trainable = False
    wrapped = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
    generator = wrapped.layers[0].seed_generator
    assert keras_internals.layers.mutable_state(norm) == [
        norm.moving_mean,
        norm.moving_variance,
    ], MOVED
    assert (
        keras_internals.layers.mutable_state(wrapped)
        == keras_internals.layers.seed_states(wrapped)
        == [generator.state]
    ), MOVED
    assert not keras_internals.layers.mutable_state(frozen), MOVED
    norm.trainable = False
    assert not keras_internals.layers.mutable_state(norm), MOVED
    measured = keras.layers.Dense(2)
    measured.activity = keras.metrics.Mean()
    wrapped.compile("sgd", "mse", metrics=["mae"])
    assert (
        keras_internals.layers.own_metrics(keras.Sequential([wrapped, measured]))
        == keras_internals.layers.mutable_state(measured)
        == measured.activity.variables
    ), MOVED


def test_metrics_of_layers_are_listed_as_a_model_lists_them():
    class Outer(keras.layers.Layer):
        def __init__(self, *inner):
            super().__init__()
            self.inner = list(inner)
            self.own = keras.metrics.Mean()

        def call(self, x):
            return x

    def outers():
        return Outer(Outer(), Outer(Outer())), Outer(Outer())

    inputs = keras.Input((2,))
    first, second = outers()
    third = keras.Sequential([keras.Input((2,)), *outers()])
    functional = keras.Model(inputs, third(second(first(inputs))))
    functional.compile("sgd", "mse", metrics=["mae"])
    sequential = keras.Sequential([*outers(), *outers()])
    for model in (functional, sequential):
        expected = [x for x in model.metrics if isinstance(x, keras.metrics.Mean)]
        found = keras_internals.layers.layer_metrics(model.layers)
        losses = [x for x in expected if x.name == "loss"]
        assert len(found) > 8
        assert [*map(id, losses), *map(id, found)] == list(map(id, expected)), MOVED
