"""A model whose state is of every kind that a checkpoint has, and data for it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfgpipe

layers = keras.layers
X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(12, 3)).astype("float32")


def make_model(width: int = 4, **arguments: Any) -> tfgpipe.PipelinedModel:
    arguments = {"num_stages": 2, "num_microbatches": 3, **arguments}
    model = tfgpipe.PipelinedModel(
        [
            layers.Dense(width, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dense(width, activation="tanh"),
            layers.Dense(width),
            layers.Dense(3),
        ],
        batch_norm="deferred",
        **arguments,
    )
    model(keras.Input([4]))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model
