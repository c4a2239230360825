"""Stacks of layers to quantize, one for each kind of layer."""

from __future__ import annotations

import keras

from tests.helpers.layer_stacks import Stack
from tfgpipe import quantization

layers = keras.layers


@keras.saving.register_keras_serializable(package="tests")
class Gated(layers.Layer):
    """A layer of a user's own, with layers inside and two kernels."""

    def __init__(self, units: int, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        policy = self.dtype_policy  # Not the global one, when it is loaded.
        self.value = layers.Dense(units, name="value", dtype=policy)
        self.gate = layers.Dense(units, activation="sigmoid", name="gate", dtype=policy)

    def build(self, shape):
        self.value.build(shape)
        self.gate.build(shape)

    def call(self, x):
        return self.value(x) * self.gate(x)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable(package="tests")
class Attends(layers.Layer):
    """Attention to itself, as users write it."""

    def __init__(self, heads: int, **kwargs):
        super().__init__(**kwargs)
        self.heads = heads
        self.attention = layers.MultiHeadAttention(
            heads, 4, name="attention", dtype=self.dtype_policy
        )

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return x + self.attention(x, x)

    def get_config(self):
        return {**super().get_config(), "heads": self.heads}


RAMPED = quantization.MovingAverageRange(ramp=True)
KERNELS = quantization.QuantizeConfig(weights=["kernel"], output=RAMPED)


def dense() -> list[layers.Layer]:
    return [
        layers.Dense(8, activation="relu"),
        layers.Dense(6, activation="tanh"),
        layers.EinsumDense("ab,bc->ac", 5, activation="gelu"),
        layers.Dense(3),
    ]


def convolutions() -> list[layers.Layer]:
    return [
        layers.Conv2D(4, 3, padding="same", activation="relu"),
        layers.DepthwiseConv2D(3),
        layers.MaxPooling2D(),
        layers.Conv2DTranspose(3, 2),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3, activation="softmax"),
    ]


def tokens() -> list[layers.Layer]:
    return [
        layers.Embedding(11, 8),
        quantization.annotate(Attends(2), KERNELS),
        layers.LayerNormalization(),
        layers.EinsumDense("abc,cd->abd", (None, 6), activation="relu"),
        layers.LSTM(4),
    ]


def custom() -> list[layers.Layer]:
    return [
        layers.Dense(6, activation="silu"),
        quantization.annotate(Gated(6), KERNELS),
        quantization.annotate(layers.Dense(5), quantization.QuantizeConfig()),
        layers.Activation("relu"),
        layers.Dense(2),
    ]


def dropout() -> list[layers.Layer]:
    return [
        layers.Dense(8, activation="relu"),
        layers.Dropout(0.3),
        layers.Dense(6, kernel_regularizer="l2", activity_regularizer="l2"),
        layers.Dense(3),
    ]


def normalized() -> list[layers.Layer]:
    return [
        layers.Conv2D(4, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Flatten(),
        layers.Dense(3),
    ]


STACKS = {
    "dense": Stack(dense, (7,)),
    "convolutions": Stack(convolutions, (6, 6, 2)),
    "tokens": Stack(tokens, (5,), "int32"),
    "custom": Stack(custom, (6,)),
    "dropout": Stack(dropout, (7,), rowwise=False),
    "normalized": Stack(normalized, (6, 6, 2), rowwise=False),
}
