"""U-Net, whose skips lead from its first layers to its last, as a Keras model.

Ronneberger et al. 2015 (https://arxiv.org/abs/1505.04597), with padding, so that the
output is as large as the image, and batch normalization.

    size      1   o--------------------- skip ---------------------> o   logits
    size    1/2     o--------------- skip ------------------> o
    size    1/4        o---------------------------------- o

Cut into stages, the skips cross the cuts: what a stage makes goes straight to the stage
that reads it.
"""

from __future__ import annotations

import keras
from keras import layers


def unet(
    *, depth: int, num_filters: int, classes: int, input_shape: tuple[int, ...]
) -> keras.Model:
    """Returns the network, from pixels to the logits of every pixel's class.

    Args:
        depth: Number of times that height and width are halved.
        num_filters: Filters at full size; at each smaller one there are twice as many.
        classes: Number of classes.
        input_shape: Height, width, channels of an image.

    Raises:
        ValueError: If the height or the width cannot be halved as often.
    """
    unit = 2**depth
    if input_shape[0] % unit or input_shape[1] % unit:
        raise ValueError(
            f"U-Net that halves {depth} times: expected a height and a width that are "
            f"multiples of {unit}; received {input_shape[0]} x {input_shape[1]}."
        )
    image = keras.Input(input_shape)
    x, skips = image, []
    for level in range(depth):
        x = _convs(x, num_filters << level)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = _convs(x, num_filters << depth)
    for level in reversed(range(depth)):
        x = layers.Conv2DTranspose(num_filters << level, 2, strides=2)(x)
        x = layers.Concatenate()([skips[level], x])
        x = _convs(x, num_filters << level)
    return keras.Model(image, layers.Conv2D(classes, 1)(x), name="unet")


def _convs(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    return x
