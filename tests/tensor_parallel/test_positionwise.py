"""Layers on parts of a sequence, against the same layers on all of it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tfgpipe.layers import TPPositionwise, TPSequenceAttention

L, FEATURES = 10, 6
RNG = np.random.default_rng(1)
X = RNG.normal(size=(3, L, FEATURES))


def stack(dropout: float = 0.0) -> list[keras.layers.Layer]:
    return [
        keras.layers.LayerNormalization(),
        keras.layers.Dense(16, activation="gelu"),
        keras.layers.Dropout(dropout, seed=3),
        keras.layers.RMSNormalization(),
        keras.layers.Dense(FEATURES),
        keras.layers.Dropout(dropout / 2, seed=4),
    ]


def pair(T: int, *, dropout: float = 0.0, residual: bool = False):
    """Returns the layers as one model, and in parts, with equal weights."""
    compare.fresh_names()
    x = keras.Input((None, FEATURES))
    y = x
    for layer in stack(dropout):
        y = layer(y)
    plain = keras.Model(x, x + y if residual else y)
    parts = TPPositionwise(stack(dropout), residual=residual, num_shards=T)
    parts.build(X.shape)
    rng = np.random.default_rng(2)
    weights = [rng.normal(size=w.shape) for w in plain.trainable_variables]
    for layer in (plain, parts):
        for v, value in zip(layer.trainable_variables, weights, strict=True):
            v.assign(value)
    return plain, parts


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("T", [1, 3, 4])
def test_outputs_and_gradients_are_those_of_the_layers(floatx, T, dropout, residual):
    floatx("float64")
    layers = pair(T, dropout=dropout, residual=residual)
    for _ in range(2):  # The second call draws other numbers.
        compare.assert_close(*map(results, layers), 1e-10, 1e-12)


def results(layer):
    """Returns the output and all gradients."""
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
        loss = compare.squares(y)
    weights = [v.value for v in layer.trainable_variables]
    return y, *tape.gradient(loss, [x, *weights])


def test_a_length_that_is_not_known(floatx):
    floatx("float64")
    plain, parts = pair(4, dropout=0.5)
    spec = tf.TensorSpec([None, None, FEATURES], tf.float64)
    calls = [
        tf.function(lambda x, layer=layer: layer(x, training=True), [spec])
        for layer in (plain, parts)
    ]
    for n in (1, 5, 9):
        a, b = (call(tf.constant(X[:, :n])) for call in calls)
        compare.close(a.numpy(), b.numpy(), str(n), 1e-10, 1e-12)


def test_a_device_computes_its_positions_alone():
    _, parts = pair(2)
    step = tf.function(lambda x: parts(x, training=True))
    graph = step.get_concrete_function(tf.TensorSpec([3, L, FEATURES])).graph
    sizes = {
        (op.device[-5:], tuple(op.outputs[0].shape))
        for op in graph.get_operations()
        if op.type in ("MatMul", "BatchMatMulV2", "Einsum")
    }
    assert {device for device, _ in sizes} == {"CPU:0", "CPU:1"}
    assert all(np.prod(shape[:-1]) == 3 * L // 2 for _, shape in sizes)


def block(T: int | None):
    """Returns a block of a transformer, in parts or of Keras' layers."""
    x = inputs = keras.Input((L, 8))
    y = keras.layers.LayerNormalization()(x)
    if T is None:
        y = keras.layers.MultiHeadAttention(4, 2)(y, y, use_causal_mask=True)
    else:
        attention = TPSequenceAttention(4, key_dim=2, num_shards=T)
        y = attention(y, y, use_causal_mask=True)
    x = x + y
    rest = [
        keras.layers.LayerNormalization(),
        keras.layers.Dense(32, activation="gelu"),
        keras.layers.Dense(8),
    ]
    if T is None:
        y = x
        for layer in rest:
            y = layer(y)
        return keras.Model(inputs, x + y)
    return keras.Model(inputs, TPPositionwise(rest, residual=True, num_shards=T)(x))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_pipeline_of_blocks_in_parts_trains_as_the_model(floatx, schedule):
    floatx("float64")
    models = []
    x = RNG.normal(size=(4, L, 8))
    for T in (None, 2):
        compare.fresh_names()
        keras.utils.set_random_seed(0)
        y = inputs = keras.Input((L, 8))
        for _ in range(2):
            y = block(T)(y)
        model = keras.Model(inputs, y)
        draw = np.random.default_rng(5)
        for v in model.trainable_variables:
            v.assign(draw.normal(size=v.shape) / 3)
        if T:
            model = tfgpipe.pipeline(
                model, num_stages=2, num_microbatches=2, schedule=schedule
            )
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(x, np.cos(x), batch_size=4, epochs=3, shuffle=False, verbose=0)
        models.append([v.numpy() for v in model.trainable_variables])
    compare.assert_close(*models, 1e-10, 1e-10)


def test_masks_go_around_the_layers():
    x = keras.Input((None,), dtype="int32")
    y = keras.layers.Embedding(9, FEATURES, mask_zero=True)(x)
    y = TPPositionwise(stack(), num_shards=2)(y)
    model = keras.Model(x, keras.layers.GlobalAveragePooling1D()(y))
    tokens = np.array([[1, 2, 3, 0, 0]])
    np.testing.assert_allclose(model(tokens), model(tokens[:, :3]), rtol=1e-5)


def test_half_precision_is_that_of_the_layers():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        plain, parts = pair(2)
        a, b = (layer(X.astype("float32")) for layer in (plain, parts))
    finally:
        keras.config.set_dtype_policy("float32")
    assert a.dtype == b.dtype == tf.bfloat16
    compare.close(np.float32(a), np.float32(b), "outputs", 1e-2, 1e-2)


@pytest.mark.parametrize(
    "layer", [keras.layers.BatchNormalization, lambda: keras.layers.GaussianNoise(0.1)]
)
def test_a_layer_with_a_state_is_refused(layer):
    with pytest.raises(ValueError, match="change no state"):
        TPPositionwise([layer()], num_shards=2).build(X.shape)
    with pytest.raises(ValueError, match="one axis of positions"):
        TPPositionwise(stack(), num_shards=2).build((3, 4))
