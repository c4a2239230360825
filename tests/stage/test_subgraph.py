"""Fingerprints, by which stages are found to be equal."""

from __future__ import annotations

import gc
from collections.abc import Hashable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tfgpipe.stage.joint import trace_joint
from tfgpipe.stage.subgraph import GraphSource

layers = keras.layers


def fingerprint(layer: keras.layers.Layer, rows: int = 2) -> Hashable:
    keras.Sequential([keras.Input((4,)), layer])
    traced = trace_joint(
        lambda inputs: {0: layer(inputs[0])},
        input_specs=[tf.TensorSpec([rows, 4])],
        weights=layer.trainable_variables,
        state=layer.non_trainable_variables,
    )
    return GraphSource(traced).fingerprint


class Scales(layers.Layer):
    """Multiplies by a number that its configuration does not tell."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def call(self, x):
        return self.scale * x


@pytest.mark.parametrize(
    "make", [lambda: layers.Dense(3, activation="gelu"), lambda: Scales(2.0)]
)
def test_equal_layers_of_different_names_have_one_fingerprint(make):
    assert fingerprint(make()) == fingerprint(make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (layers.Dense(3), layers.Dense(4)),
        (layers.Dense(3), layers.Dense(3, use_bias=False)),
        (layers.Dense(3, activation="relu"), layers.Dense(3, activation="gelu")),
        (layers.Dense(3), layers.Dense(3, trainable=False)),
        (Scales(2.0), Scales(3.0)),
    ],
)
def test_layers_that_differ_in_anything_have_two(one, other):
    assert fingerprint(one) != fingerprint(other)


def test_outputs_shapes_and_captured_tensors_tell_graphs_apart():
    known = [tf.random.normal([1000]) for _ in range(2)]  # No constants.

    def traced(*, order=(0, 1), rows=2, captured=known[0]):
        def body(inputs):
            results = tf.exp(inputs[0]), inputs[0] + tf.reduce_sum(captured)
            return {i: results[n] for i, n in enumerate(order)}

        specs = [tf.TensorSpec([rows, 4])]
        joint = trace_joint(body, input_specs=specs, weights=[], state=[])
        return GraphSource(joint).fingerprint

    assert traced() == traced()
    for change in (
        {"order": (1, 0)},
        {"order": (1, 1)},
        {"order": (0,)},
        {"rows": 3},
        {"captured": known[1]},
    ):
        assert traced(**change) != traced(), change


def test_captured_tensors_tell_stages_apart():
    class Adds(layers.Layer):
        def __init__(self, value):
            super().__init__()
            self.value = tf.random.normal([4, 1000])  # Too large to become a constant.
            self.value += value

        def call(self, x):
            return x + tf.reduce_sum(self.value, axis=1)

    one, other = Adds(0.0), Adds(1.0)
    layer = tfgpipe.PipelinedLayer([one, other], num_stages=2, num_microbatches=2)
    x = tf.ones((4, 4))
    np.testing.assert_allclose(layer(x), other(one(x)), rtol=1e-6)


def test_what_is_captured_stays_for_as_long_as_its_fingerprint():
    """An `id` may come again once its object is gone."""

    class Adds(layers.Layer):
        def __init__(self):
            super().__init__()
            self.value = tf.ones([4, 1000])  # Too large to become a constant.

        def call(self, x):
            return x + tf.reduce_sum(self.value, axis=1)

    found = set()
    gc.freeze()  # What other tests have left takes a second to look through.
    try:
        for _ in range(10):
            found.add(fingerprint(Adds()))
            gc.collect()
    finally:
        gc.unfreeze()
    assert len(found) == 10
