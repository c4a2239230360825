"""Small transformers whose blocks are alike, plain and as an SPMD pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import tfgpipe

VOCABULARY, LENGTH = 11, 6


class Block(keras.layers.Layer):
    """A transformer block, which says that its configuration is complete.

    Attention takes most of the time to trace, and few tests need it.
    """

    config_is_complete = True

    def __init__(
        self,
        width: int = 8,
        *,
        dropout: float = 0.0,
        regularizer: Any = None,
        attends: bool = False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.width, self.rate = width, dropout
        self.regularizer = keras.regularizers.get(regularizer)
        layers = keras.layers
        self.norm = layers.LayerNormalization()
        self.attends = attends
        if attends:
            self.attention = layers.MultiHeadAttention(2, width // 2)
        self.dropout = layers.Dropout(dropout, seed=3)
        self.inner = layers.Dense(
            2 * width, activation="gelu", kernel_regularizer=self.regularizer
        )
        self.outer = layers.Dense(width)

    def build(self, shape):
        self.norm.build(shape)
        if self.attends:
            self.attention.build(shape, shape)
        self.inner.build(shape)
        self.outer.build((*shape[:-1], 2 * self.width))

    def call(self, x, training=None):
        h = self.norm(x)
        if self.attends:
            h = self.attention(h, h, use_causal_mask=True)
        h = self.dropout(self.inner(h), training=training)
        return x + self.outer(h)

    def get_config(self):
        return {
            **super().get_config(),
            "width": self.width,
            "dropout": self.rate,
            "attends": self.attends,
            "regularizer": keras.regularizers.serialize(self.regularizer),
        }


def data(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, VOCABULARY, (rows, LENGTH + 1), dtype=np.int32)
    return x[:, :-1], x[:, 1:]


def model(
    blocks: Sequence[keras.layers.Layer],
    *,
    optimizer: Any = "adam",
    width: int = 8,
    **pipeline: Any,
) -> keras.Model:
    """Returns a compiled model of these blocks, pipelined if there are arguments."""
    middle = [tfgpipe.SPMDPipeline(blocks, **pipeline)] if pipeline else blocks
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, width),
            *middle,
            keras.layers.Dense(VOCABULARY),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def pair(
    make: Callable[[], keras.layers.Layer], *, num_layers: int, **arguments: Any
) -> tuple[keras.Model, keras.Model]:
    """Returns the plain and the pipelined model, of equal seeds."""
    pipeline = {
        name: arguments.pop(name)
        for name in ("num_stages", "num_microbatches", "partitioned")
        if name in arguments
    }
    models = []
    for options in ({}, pipeline):
        keras.utils.set_random_seed(1)
        blocks = [make() for _ in range(num_layers)]
        # An optimizer is for one model.
        own = {name: value() for name, value in arguments.items()}
        models.append(model(blocks, **options, **own))
    return models[0], models[1]


def pipeline_of(model: keras.Model) -> tfgpipe.SPMDPipeline:
    (found,) = (x for x in model.layers if isinstance(x, tfgpipe.SPMDPipeline))
    return found


def values(model: keras.Model) -> list[np.ndarray]:
    """Returns the values of all variables, layer by layer as in the plain model."""
    layers = []
    for layer in model.layers:
        is_pipeline = isinstance(layer, tfgpipe.SPMDPipeline)
        layers += layer.unstack() if is_pipeline else [layer]
    return [np.asarray(v) for layer in layers for v in layer.variables]
