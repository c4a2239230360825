"""AmoebaNet-D, the network that GPipe was measured with, as a Keras model.

Found by evolution (Real et al. 2018, https://arxiv.org/abs/1802.01548), enlarged by
GPipe (Huang et al. 2019, https://arxiv.org/abs/1811.06965) to (L, D) = (num_layers,
num_filters): (18, 208) has 82 million weights.

    image   stem    R  R    N x L/3    R    N x L/3    R    N x L/3    classes
    size     /2    /4 /8       /8     /16      /16    /32      /32
    filters D/4   D/2  D        D      2D       2D     4D       4D

A cell, normal or reducing, takes the outputs of the two cells before it. They are its
states 0, of the last one, and 1; five sums of two operations, each on an earlier state,
are states 2 to 6, and some of the states, side by side, are its output. In a reducing
cell, operations on states 0 and 1 halve height and width.

The paper draws states 4 to 6 as the output of the normal cell. The authors' program
(tensorflow/tpu, models/official/amoeba_net) has 0, 3, 4 and 6, which is what gives the
number of weights that GPipe states.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import keras
from keras import layers

Operation = Literal[
    "none", "avg_3x3", "max_3x3", "max_2x2", "conv_1x1", "conv_3x3", "conv_1x7_7x1"
]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A kind of cell.

    Attributes:
        sums: For each state after the first two, the states and operations it adds up.
        output: The states that are its output.
        stride: 2 if it halves height and width, else 1.
    """

    sums: tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...]
    output: tuple[int, ...]
    stride: int


NORMAL = Cell(
    sums=(
        ((1, "conv_1x1"), (1, "max_3x3")),
        ((1, "none"), (0, "conv_1x7_7x1")),
        ((0, "conv_1x1"), (0, "conv_1x7_7x1")),
        ((2, "max_3x3"), (2, "none")),
        ((1, "avg_3x3"), (5, "conv_1x1")),
    ),
    output=(0, 3, 4, 6),
    stride=1,
)
REDUCTION = Cell(
    sums=(
        ((0, "max_2x2"), (0, "max_3x3")),
        ((2, "none"), (1, "conv_3x3")),
        ((2, "conv_1x7_7x1"), (2, "max_3x3")),
        ((3, "none"), (1, "max_2x2")),
        ((2, "avg_3x3"), (3, "conv_1x1")),
    ),
    output=(4, 5, 6),
    stride=2,
)

# Windows of pools, and of convolutions: one after another, between two of 1 x 1 that
# take a quarter of the filters and give all of them.
_POOLS: dict[str, tuple[type[layers.Layer], int]] = {
    "avg_3x3": (layers.AveragePooling2D, 3),
    "max_3x3": (layers.MaxPooling2D, 3),
    "max_2x2": (layers.MaxPooling2D, 2),
}
_WINDOWS: dict[str, list[tuple[int, int]]] = {
    "conv_3x3": [(3, 3)],
    "conv_1x7_7x1": [(1, 7), (7, 1)],
}


def amoebanet_d(
    *, num_layers: int, num_filters: int, classes: int, input_shape: tuple[int, ...]
) -> keras.Model:
    """Returns the network, from pixels to logits.

    Args:
        num_layers: L, normal cells, a multiple of 3.
        num_filters: D, filters of the first normal cells, a multiple of 16.
        classes: Number of classes.
        input_shape: Height, width, channels of an image.

    Raises:
        ValueError: If `num_layers` or `num_filters` is no such multiple.
    """
    for name, value, unit in [
        ("num_layers", num_layers, 3),
        ("num_filters", num_filters, 16),
    ]:
        if value < unit or value % unit:
            raise ValueError(
                f"{name} of AmoebaNet-D: expected a multiple of {unit}; received "
                f"{value}."
            )
    image = keras.Input(input_shape)
    filters = num_filters // 4
    x = layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(image)
    x = _normalized(x)
    kinds = [REDUCTION, REDUCTION] + [NORMAL] * (num_layers // 3)
    kinds += 2 * ([REDUCTION] + [NORMAL] * (num_layers // 3))
    last, before = x, x
    for kind in kinds:
        filters *= kind.stride
        last, before = _cell(kind, last, before, filters), last
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(last))
    return keras.Model(image, layers.Dense(classes)(x), name="amoebanet_d")


def _cell(
    kind: Cell, last: keras.KerasTensor, before: keras.KerasTensor, filters: int
) -> keras.KerasTensor:
    """Returns the output of a cell that reads those of the last and the one before."""
    size = last.shape[1:3]
    states = [_conv(last, filters), _fitted(before, filters, size)]
    for terms in kind.sums:
        states.append(
            layers.Add()(
                [
                    _operation(what, states[i], filters, kind.stride if i < 2 else 1)
                    for i, what in terms
                ]
            )
        )
    return layers.Concatenate()([states[i] for i in kind.output])


def _operation(
    what: Operation, x: keras.KerasTensor, filters: int, stride: int
) -> keras.KerasTensor:
    if what == "none":
        return x if stride == 1 else _conv(x, filters, stride=stride)
    if what == "conv_1x1":
        return _conv(x, filters, stride=stride)
    if what in _POOLS:
        pool, window = _POOLS[what]
        return pool(window, strides=stride, padding="same")(x)
    x = _conv(x, filters // 4)
    for height, width in _WINDOWS[what]:
        # A window of height 1 skips columns alone.
        strides = (stride if height > 1 else 1, stride if width > 1 else 1)
        x = _conv(x, filters // 4, window=(height, width), stride=strides)
    return _conv(x, filters)


def _fitted(
    x: keras.KerasTensor, filters: int, size: tuple[int, ...]
) -> keras.KerasTensor:
    """Returns the output of the cell before the last, as large as the last one's."""
    if x.shape[1:3] != size:
        return _halved(x, filters)
    return x if x.shape[-1] == filters else _conv(x, filters)


def _halved(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    """Halves height and width: half of the filters see even pixels, half see odd."""
    x = layers.ReLU()(x)
    odd = layers.ZeroPadding2D(((0, 1), (0, 1)))(layers.Cropping2D(((1, 0), (1, 0)))(x))
    halves = [
        layers.Conv2D(filters // 2, 1, strides=2, use_bias=False)(part)
        for part in (x, odd)
    ]
    return _normalized(layers.Concatenate()(halves))


def _conv(
    x: keras.KerasTensor,
    filters: int,
    *,
    window: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
) -> keras.KerasTensor:
    """ReLU, convolution, batch normalization."""
    x = layers.ReLU()(x)
    x = layers.Conv2D(filters, window, strides=stride, padding="same", use_bias=False)(
        x
    )
    return _normalized(x)


def _normalized(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.BatchNormalization(momentum=0.9)(x)
