"""Stacks of layers that the comparisons run on, one for each kind of trouble."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import get_args

import keras
import numpy as np

from tfgpipe import remat
from tfgpipe.stage.codecs import TransferDtype

REMAT_MODES = remat.NAMES
TRANSFER_DTYPES = (None, *get_args(TransferDtype))
layers = keras.layers


@dataclasses.dataclass(frozen=True)
class Stack:
    """A factory of layers, with the data to feed them.

    Attributes:
        make: Makes the layers, at least four.
        shape: Shape of one input row.
        dtype: Type of the input.
        rowwise: Whether a row's result is independent of the other rows in its batch,
            and of how many came before; if so any M gives what the plain stack gives.
    """

    make: Callable[[], Sequence[keras.layers.Layer]]
    shape: tuple[int, ...]
    dtype: str = "float32"
    rowwise: bool = True

    def data(self, rows: int) -> np.ndarray:
        rng = np.random.default_rng(1)
        if self.dtype == "int32":
            return rng.integers(0, 11, (rows, *self.shape), dtype=np.int32)
        return rng.standard_normal((rows, *self.shape), dtype=np.float32)


class ResidualBlock(layers.Layer):
    """A layer of layers, built lazily, as users write them."""

    def __init__(self, units: int, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization()
        self.inner = layers.Dense(2 * units, activation="gelu")
        self.outer = layers.Dense(units)

    def build(self, shape):
        self.norm.build(shape)
        self.inner.build(shape)
        self.outer.build((*shape[:-1], self.inner.units))

    def call(self, x):
        return x + self.outer(self.inner(self.norm(x)))


class Balances(layers.Layer):
    """Adds a product of means over the batch, in training."""

    def call(self, x, training=False):
        if training:
            shares = keras.ops.mean(keras.ops.softmax(x), axis=0)
            loss = keras.ops.sum(keras.ops.square(shares))
            self.add_loss(keras.ops.cast(loss, keras.config.floatx()))
        return x


class AddsLoss(layers.Layer):
    """Adds a mean over rows as a loss."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return 2.0 * x


def dense():
    return [
        layers.Dense(6, activation="relu"),
        layers.Dense(5, activation="tanh"),
        layers.Dense(7, activation="gelu"),
        layers.Dense(3),
    ]


def convolutional():
    return [
        layers.Conv2D(4, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(3, 3, strides=2),
        layers.Flatten(),
        layers.Dense(2),
    ]


def embedded():
    return [
        layers.Embedding(11, 6),
        layers.Conv1D(5, 3, padding="causal"),
        layers.LSTM(4, return_sequences=True),
        layers.GlobalAveragePooling1D(),
        layers.Dense(3),
    ]


def masked():
    return [
        layers.Embedding(11, 6, mask_zero=True),
        layers.Dropout(0.0),
        layers.LSTM(5, return_sequences=True),
        layers.GRU(4),
        layers.Dense(2),
    ]


def blocks():
    return [ResidualBlock(6) for _ in range(4)]


def normalised():
    return [
        layers.Dense(6),
        layers.BatchNormalization(momentum=0.9),
        layers.Activation("relu"),
        layers.Dense(4),
        layers.BatchNormalization(momentum=0.8),
    ]


def dropped():
    return [
        layers.Dense(8),
        layers.Dropout(0.5, seed=3),
        layers.Dense(6),
        layers.GaussianNoise(0.3, seed=4),
        layers.Dense(4),
    ]


def frozen():
    stack = dense()
    stack[1].trainable = False
    stack[3].trainable = False
    return stack


def weightless():
    return [
        layers.Activation("tanh"),
        layers.Dense(4),
        layers.Reshape((2, 2)),
        layers.Flatten(),
        layers.Activation("linear"),
    ]


def regularised():
    return [
        layers.Dense(6, kernel_regularizer="l2", activity_regularizer="l2"),
        AddsLoss(),
        layers.Dense(4, bias_regularizer="l1"),
        layers.ActivityRegularization(l1=0.01),
        layers.Dense(3),
    ]


STACKS = {
    "dense": Stack(dense, (5,)),
    "convolutional": Stack(convolutional, (8, 8, 2)),
    "embedded": Stack(embedded, (6,), "int32"),
    "masked": Stack(masked, (6,), "int32"),
    "blocks": Stack(blocks, (6,)),
    "normalised": Stack(normalised, (5,), rowwise=False),
    "dropped": Stack(dropped, (5,), rowwise=False),
    "frozen": Stack(frozen, (5,)),
    "weightless": Stack(weightless, (6,)),
    "regularised": Stack(regularised, (5,)),
}
