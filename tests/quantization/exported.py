"""Models to write files in 8 bits of, and what these files have to compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import keras
import numpy as np
import pytest

import tfgpipe
from tfgpipe.quantization import (
    MovingAverageRange,
    compare,
    default_8bit,
)
from tfgpipe.quantization.tflite import Comparison

layers = keras.layers

# Its first move replaces the initial range, so few steps are enough.
SCHEME = default_8bit(activations=MovingAverageRange(ramp=True))


def dense():
    return [
        keras.Input((16,)),
        layers.Dense(32, activation="relu"),
        layers.Dense(32, activation="relu"),
        layers.Dense(10),
    ]


def convolutions():
    return [
        keras.Input((8, 8, 3)),
        layers.Conv2D(8, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(10),
    ]


def normalized():
    return [
        keras.Input((12, 12, 3)),
        layers.Conv2D(8, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Conv2D(16, 3, strides=2, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10),
    ]


def attention():
    x = keras.Input((8, 16))
    hidden = layers.LayerNormalization(name="norm")(x)
    hidden = layers.MultiHeadAttention(2, 8, name="attention")(hidden, hidden)
    hidden = layers.Flatten()(layers.Add()([x, hidden]))
    return keras.Model(x, layers.Dense(4, name="last")(hidden))


def data(model: keras.Model, rows: int = 256) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, *model.input_shape[1:])).astype("float32")
    return x, random.integers(0, model.output_shape[-1], rows)


def trained(model: keras.Model, *, epochs: int) -> keras.Model:
    """Trains a model; without epochs it sees the rows once, and moves its ranges."""
    if not epochs:
        model(data(model)[0], training=True)
        return model
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    x, y = data(model)
    model.fit(x, y, batch_size=16, epochs=epochs, verbose=0)
    return model


def assert_integers_are_the_models(model: keras.Model, file: Path) -> None:
    """Asserts that a file of a model trained for 8 bits gives its integers."""
    compared = compare(model, file, data(model))
    assert compared.identical >= 0.98
    assert compared.largest_difference <= 1
    assert compared.operations.num_floats == 0
    assert compared.num_bytes == file.stat().st_size
    assert compared.accuracy == pytest.approx(compared.int8_accuracy, abs=0.02)


WAYS = ("model", "list", "inside")


def pipelined(stack: keras.Model, way: str) -> keras.Model:
    """Returns a pipeline of the layers of a stack, in one of `WAYS`."""
    options = {"num_stages": 2, "num_microbatches": 4}
    if way == "model":
        return tfgpipe.pipeline(stack, **options)
    if way == "list":
        model = tfgpipe.PipelinedModel(stack.layers, **options)
        model(np.zeros((8, 16), "float32"))
        return model
    layer = tfgpipe.PipelinedLayer(stack.layers[:-1], **options)
    return keras.Sequential([keras.Input((16,)), layer, stack.layers[-1]])


def exported(model: keras.Model, file: Path, stack: keras.Model) -> Comparison:
    """Returns how near a file comes; but for its size, as names in files differ."""
    tfgpipe.export_int8(model, file)
    compared = compare(model, file, data(stack))
    assert compared.identical >= 0.98
    return dataclasses.replace(compared, num_bytes=0)
