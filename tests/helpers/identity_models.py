"""The models whose steps `identity` compares, and their data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tests.helpers import zoo
from tests.helpers.layer_stacks import AddsLoss, Balances, ResidualBlock
from tests.helpers.reference import DeferredNorm

layers = keras.layers
Dense = Callable[..., keras.layers.Layer]


@dataclasses.dataclass(frozen=True)
class Stack:
    """A model of six layers or more.

    Attributes:
        make: Makes its layers, or a Functional model, given what makes dense layers.
        shape: Shape of one input row.
        ids: Whether inputs and targets are integers.
        rowwise: Whether a row's result is independent of the other rows in its batch,
            and of how many came before; if so any M gives what the plain model gives.
        reference: Makes the plain model's layers as `make` does, given M as well,
            where they are others.
        arguments: More arguments of the pipeline.
    """

    make: Callable[[Dense], Sequence[keras.layers.Layer] | keras.Model]
    shape: tuple[int, ...] = (5,)
    ids: bool = False
    rowwise: bool = True
    reference: Callable[[Dense, int], Sequence[keras.layers.Layer]] | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def input(self) -> keras.KerasTensor:
        dtype = "int32" if self.ids else keras.config.floatx()
        return keras.Input(self.shape, dtype=dtype)

    def model(self, made: Sequence[keras.layers.Layer] | keras.Model) -> keras.Model:
        """Returns as a model what `make` has made."""
        if isinstance(made, keras.Model):
            return made
        return keras.Sequential([self.input(), *made])

    def inputs(self, rows: int) -> np.ndarray:
        if self.ids:
            return zoo.padded_ids(rows, *self.shape)
        return zoo.floats(rows, *self.shape)

    def targets(self, rows: int, shape: tuple[int, ...]) -> np.ndarray:
        if self.ids:
            return zoo.ids(rows, *shape[:-1], seed=2)
        return zoo.floats(rows, *shape, seed=2)

    def compiled(self, reduction: str = "sum_over_batch_size") -> dict[str, Any]:
        """Returns the arguments of `compile`, given the reduction of the loss."""
        if self.ids:
            loss = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=reduction
            )
            kinds = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
            return {"loss": loss, **kinds}
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        return {"loss": loss, "metrics": ["mae"], "weighted_metrics": ["mse"]}


def dense(dense: Dense) -> list[keras.layers.Layer]:
    return [*(dense(n, activation="tanh") for n in (6, 5, 7, 4, 6)), dense(3)]


def wide(dense: Dense) -> list[keras.layers.Layer]:
    """Weights with more numbers than a mini-batch's values, one layer twice."""
    made = [dense(n, activation="tanh") for n in (48, 64, 48, 48)]
    return [*made, made[-1], dense(3)]


def convolutional(dense: Dense) -> list[keras.layers.Layer]:
    return [
        layers.Conv2D(4, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(3, 3, activation="relu"),
        layers.Flatten(),
        dense(6, activation="tanh"),
        dense(3),
    ]


def blocks(dense: Dense) -> list[keras.layers.Layer]:
    """Layers of layers, all alike, built lazily."""
    return [*(ResidualBlock(6) for _ in range(5)), dense(3)]


def frozen(dense: Dense) -> list[keras.layers.Layer]:
    """Some layers have no weights to train, some none at all."""
    # Flattened to the same channels: levels of int8 that are rounded to levels with
    # another scale may lie exactly halfway, where the last bit decides.
    stack = [
        layers.Activation("tanh"),
        dense(6, activation="tanh"),
        layers.Reshape((1, -1)),
        layers.Flatten(),
        dense(4, activation="tanh"),
        dense(3),
    ]
    stack[1].trainable = False
    return stack


def dropped(dense: Dense) -> list[keras.layers.Layer]:
    return [
        dense(8),
        layers.Dropout(0.5, seed=3),
        dense(6, activation="tanh"),
        layers.GaussianNoise(0.3, seed=4),
        dense(4),
        layers.Dropout(0.2, seed=5),
        dense(3),
    ]


def normalised(
    dense: Dense, norm: Dense = layers.BatchNormalization
) -> list[keras.layers.Layer]:
    # A bias before a normalization would have nothing but rounding as its gradient. The
    # variance of two examples is often near zero, and without a larger epsilon its
    # inverse magnifies the rounding of single precision.
    return [
        layers.Dense(6, use_bias=False),
        norm(momentum=0.9, epsilon=0.05),
        layers.Activation("tanh"),
        layers.Dense(4, use_bias=False),
        norm(momentum=0.8, epsilon=0.05),
        dense(3),
    ]


def regularised(dense: Dense) -> list[keras.layers.Layer]:
    return [
        layers.Dense(6, kernel_regularizer="l2"),
        layers.Dense(5, activation="tanh", activity_regularizer="l2"),
        layers.ActivityRegularization(l1=0.01),
        AddsLoss(),
        layers.Dense(6, bias_regularizer="l1", activation="tanh"),
        layers.Dense(4, kernel_regularizer="l1", activation="tanh"),
        dense(3),
    ]


def balanced(dense: Dense) -> list[keras.layers.Layer]:
    """Losses that couple the examples of a mini-batch, as if of experts."""
    return [
        dense(6, activation="tanh"),
        Balances(),
        dense(5, activation="tanh"),
        layers.Dense(6, activation="tanh"),
        Balances(),
        dense(3),
    ]


def masked(dense: Dense, length: int | None = 5) -> keras.Model:
    """Padding that attention and recurrence read, and that the loss leaves out."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(zoo.IDS, 4, mask_zero=True)(inputs)
    x = layers.Add()([x, zoo.attention()(x, x)])
    x = layers.LayerNormalization()(x)
    x = layers.LSTM(4, return_sequences=True)(x)
    x = layers.Dense(5, activation="tanh")(x)
    return keras.Model(inputs, dense(zoo.IDS)(x))


def skipping(dense: Dense) -> keras.Model:
    inputs = keras.Input((5,))
    a = dense(6, activation="tanh")(inputs)
    b = dense(7, activation="tanh")(a)
    c = dense(6, activation="tanh")(layers.Concatenate()([b, inputs]))
    d = dense(4, activation="tanh")(layers.Add()([c, a]))
    return keras.Model(inputs, dense(3)(layers.Concatenate()([d, b, a])))


def two_encoders(dense: Dense) -> keras.Model:
    """Two encoders that neither reads the other, and a head that reads both."""

    def encoder(*units: int) -> keras.Model:
        x = encoded = keras.Input((5,))
        for n in units:
            encoded = dense(n, activation="tanh")(encoded)
        return keras.Model(x, encoded)

    inputs = keras.Input((5,))
    encoded = [encoder(*units)(inputs) for units in ((6, 4), (7, 6))]
    return keras.Model(inputs, dense(3)(layers.Concatenate()(encoded)))


def tied(dense: Dense) -> keras.Model:
    """The first stage's embedding is the last stage's projection."""
    inputs = keras.Input((4,), dtype="int32")
    embedding = layers.ReversibleEmbedding(zoo.IDS, 4, name="tied")
    x = embedding(inputs)
    for n in (6, 5, 6):
        x = dense(n, activation="tanh")(x)
    x = layers.Dense(4, activation="tanh")(x)
    return keras.Model(inputs, embedding(x, reverse=True))


STACKS = {
    "dense": Stack(dense),
    "wide": Stack(wide),
    "convolutional": Stack(convolutional, (6, 6, 2)),
    "blocks": Stack(blocks, (6,)),
    "frozen": Stack(frozen),
    "dropped": Stack(dropped, rowwise=False),
    "normalised": Stack(normalised, rowwise=False),
    "deferred": Stack(
        normalised,
        reference=lambda dense, M: normalised(
            dense, functools.partial(DeferredNorm, M)
        ),
        arguments={"batch_norm": "deferred"},
    ),
    "regularised": Stack(regularised),
    "balanced": Stack(balanced),
    "masked": Stack(masked, ids=True),
    "skipping": Stack(skipping),
    "two_encoders": Stack(two_encoders),
    "tied": Stack(tied, (4,), ids=True),
}
# Those that are a list of layers, so that another may be put between any two.
LISTED = STACKS.keys() - {"masked", "skipping", "two_encoders", "tied"}
