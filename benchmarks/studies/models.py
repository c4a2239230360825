"""Keras models that `benchmarks.studies.partition` partitions."""

from __future__ import annotations

from collections.abc import Callable

import keras

from benchmarks.workloads import EncoderBlock

layers = keras.layers


def resnet50() -> keras.Model:
    """Returns ResNet-50 on 64 x 64 pictures, 10 classes."""
    return keras.applications.ResNet50(
        input_shape=(64, 64, 3), weights=None, classes=10
    )


def unet(*, size: int = 64, width: int = 16, depth: int = 4) -> keras.Model:
    """Returns a U-Net: convolutions down, transposed convolutions up, skips across."""
    x = inputs = keras.Input((size, size, 3))
    skips = []
    for level in range(depth):
        x = _double_convolution(x, width * 2**level)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = _double_convolution(x, width * 2**depth)
    for level in reversed(range(depth)):
        x = layers.Conv2DTranspose(width * 2**level, 2, strides=2)(x)
        x = layers.Concatenate()([x, skips[level]])
        x = _double_convolution(x, width * 2**level)
    return keras.Model(inputs, layers.Conv2D(4, 1)(x), name="unet")


def transformer24() -> keras.Model:
    """Returns 24 encoder blocks between an embedding and a projection."""
    x = inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(4096, 128)(x)
    for _ in range(24):
        x = EncoderBlock()(x)
    outputs = layers.Dense(4096)(layers.LayerNormalization()(x))
    return keras.Model(inputs, outputs, name="transformer24")


MODELS: dict[str, Callable[[], keras.Model]] = {
    "resnet50": resnet50,
    "unet": unet,
    "transformer24": transformer24,
}


def _double_convolution(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return x
