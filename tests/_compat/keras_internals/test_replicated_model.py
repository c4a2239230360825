"""The contract of models of Keras on replicas."""

from __future__ import annotations

import keras
import numpy as np

from tests.helpers import compare
from tests.helpers.versions import MOVED
from tfgpipe._compat import keras_internals


def test_a_model_of_replicas_is_built_on_what_the_first_gets():
    """Keras takes the mean over replicas, which have three, three and two rows."""
    built = []

    class Model(keras_internals.replicated_model.Replicated):
        def build(self, shape):
            built.append(shape)
            self.dense = keras.layers.Dense(1)
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    with compare.mirrored(3).scope():
        model = Model()
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=8, verbose=0)
    assert built == [(3, 2)], MOVED
