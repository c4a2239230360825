"""Two threads that train and predict with two models at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare

layers = keras.layers


def plain(seed: int) -> keras.Model:
    """Returns a model whose trace replaces attributes of layers, losses, variables."""
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="gelu")(inputs)
    x = layers.BatchNormalization()(x)
    outputs = [layers.Dense(n, name=f"output_{n}")(x) for n in (2, 3)]
    model = keras.Model(inputs, outputs)
    rng = np.random.default_rng(seed)
    model.set_weights([rng.uniform(0.1, 1.0, w.shape) for w in model.get_weights()])
    return model


def trained(model: keras.Model, seed: int) -> list[np.ndarray]:
    """Returns losses, predictions and weights of a model after training."""
    rng = np.random.default_rng(seed)
    x, *y = (rng.standard_normal((8, n)).astype("float32") for n in (6, 2, 3))
    model.compile(keras.optimizers.Adam(0.01), ["mse", "mae"], metrics=[["mse"], []])
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    predictions = model.predict(x, batch_size=4, verbose=0)
    return [*history.values(), *predictions, *model.get_weights()]


@pytest.mark.nightly
@pytest.mark.parametrize("quantized", [False, True])
def test_results_are_those_of_one_thread(quantized):
    def make(seed):
        compare.fresh_names()
        model = plain(seed)
        if quantized:
            model = tfgpipe.quantization.apply(model)
        return tfgpipe.pipeline(model, num_stages=2, num_microbatches=2)

    expected = [trained(make(seed), seed) for seed in (1, 2)]
    models = [make(seed) for seed in (1, 2)]
    together = threading.Barrier(2)

    def train(index):
        together.wait(30)
        return trained(models[index], index + 1)

    with ThreadPoolExecutor(2) as pool:
        received = list(pool.map(train, range(2)))
    for a, b in zip(expected, received, strict=True):
        compare.assert_allclose(b, a, rtol=1e-6, atol=1e-7)
