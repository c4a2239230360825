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
    apply,
    compare,
    default_8bit,
    plain_copy,
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


def assert_attention_is_islands_of_floats(file: Path, *, epochs: int) -> None:
    """Asserts that floats are in layers without 8 bits alone, and named."""
    model = trained(apply(attention(), scheme=SCHEME), epochs=epochs)
    tfgpipe.export_int8(model, file)
    compared = compare(model, file, data(model))
    assert {"norm", "attention", "query"} <= set(compared.operations.floats)
    assert compared.operations.floats["attention"]["SOFTMAX"] == 1
    assert "last" not in compared.operations.floats
    assert "1 SOFTMAX" in str(compared)
    assert compared.largest_difference <= 8

    # With inputs to see they are integers too, further away from the model.
    tfgpipe.export_int8(model, file, data(model)[0])
    calibrated = compare(model, file, data(model))
    assert calibrated.operations.num_floats < compared.operations.num_floats


def assert_not_trained_for_it_is_near(file: Path, *, epochs: int) -> None:
    """Asserts that a model without ranges is exported by what it sees."""
    model = trained(keras.Sequential(normalized()), epochs=epochs)
    tfgpipe.export_int8(model, file, data(model)[0])
    compared = compare(model, file, data(model))
    assert compared.operations.num_floats == 0
    assert compared.largest_difference <= 4
    assert compared.int8_accuracy == pytest.approx(compared.accuracy, abs=0.05)


def assert_mixed_precision_is_rebuilt(policy: str, file: Path, *, epochs: int) -> None:
    """Asserts that the copy that is written is in float32, and the model stays."""
    keras.config.set_dtype_policy(policy)
    try:
        model = trained(apply(keras.Sequential(dense()), scheme=SCHEME), epochs=epochs)
        before = [np.asarray(v) for v in model.weights]
        copy = plain_copy(model)
        tfgpipe.export_int8(model, file)
        assert keras.config.dtype_policy().name == policy
    finally:
        keras.config.set_dtype_policy("float32")
    assert {layer.dtype_policy.name for layer in copy.layers} == {"float32"}
    assert {layer.compute_dtype for layer in model.layers[1:]} == {policy[6:]}
    for variable, old, new in zip(model.weights, before, copy.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(variable), old)
        np.testing.assert_array_equal(np.asarray(new), old)
    compared = compare(model, file, data(model))
    assert compared.identical >= 0.98
    assert compared.largest_difference <= 1


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
