"""Models to compare, each with shards and without, and what is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.helpers import compare
from tests.helpers.reference import Shards
from tfgpipe.tensor_parallel import (
    TPMLP,
    TPCrossEntropy,
    TPDense,
    TPEmbedding,
    TPLayerNormalization,
    TPMultiHeadAttention,
)

layers = keras.layers
WAYS = {
    "sync": {"collective": "gather"},
    "ring": {"collective": "ring"},
    "both_ways": {"collective": "bidirectional_ring"},
}
VOCABULARY = 11  # T = 2, 3, 4 pad it.


@dataclasses.dataclass(frozen=True)
class Case:
    """A model without shards and the same with.

    Attributes:
        make: Makes it: with T shards and arguments of the ways, or without for None.
        data: Makes its inputs of so many rows.
    """

    make: Callable[..., keras.Model]
    data: Callable[[int], Any]

    def pair(self, T: int, **ways: Any) -> tuple[keras.Model, keras.Model]:
        """Returns both, with equal weights and seeds, none of them zero."""
        plain = self.make(None)
        compare.fresh_names()
        sharded = self.make(T, **ways)
        rng = np.random.default_rng(3)
        weights = [rng.standard_normal(w.shape) / 3 for w in plain.get_weights()]
        plain.set_weights(weights)
        Shards(plain.weights, sharded.weights, T).assign()
        return plain, sharded


def columns_and_rows(T: int | None, **ways: Any) -> keras.Model:
    x = keras.Input((12,))
    if T is None:
        y = layers.Dense(24, activation="gelu")(x)
        y = layers.Dense(10, use_bias=False)(y)
        return keras.Model(x, layers.Dense(12, activation="softmax")(y))
    y = TPDense(24, activation="gelu", num_shards=T, **ways)(x)
    y = TPDense(10, partition="row", use_bias=False, num_shards=T, **ways)(y)
    return keras.Model(x, TPDense(12, activation="softmax", num_shards=T, **ways)(y))


def all_in_parts(T: int | None, **ways: Any) -> keras.Model:
    """Nothing between input and output is ever whole, on a ring."""
    x = keras.Input((5, 12))
    if T is None:
        y = layers.LayerNormalization()(x)
        y = layers.Dense(24, activation="relu")(y)
        y = layers.Dense(12, activation="tanh")(y)
        return keras.Model(x, layers.LayerNormalization()(y))
    parts = {"num_shards": T, "gather_output": False}
    y = TPLayerNormalization(**parts)(x)
    y = TPDense(24, activation="relu", **parts, **ways)(y)
    y = TPDense(12, partition="row", activation="tanh", **parts, **ways)(y)
    return keras.Model(x, TPLayerNormalization(num_shards=T)(y))


def mlp(T: int | None, **ways: Any) -> keras.Model:
    x = keras.Input((5, 7))
    if T is None:
        y = layers.Dense(12, activation="gelu")(x)
        y = layers.Dense(7)(y)
        y = layers.Dropout(0.3, seed=1)(y)
    else:
        y = TPMLP(12, units=7, dropout=0.3, seed=1, num_shards=T, **ways)(x)
    return keras.Model(x, layers.Dense(3)(y))


def attention(T: int | None, **ways: Any) -> keras.Model:
    """Of a sequence to another, with masks, then of itself, causal, with dropout."""
    x, context = keras.Input((5, 6)), keras.Input((7, 8))
    common = {"num_heads": 12, "key_dim": 3, "value_dim": 2}
    if T is None:
        make = layers.MultiHeadAttention
    else:
        make, common = TPMultiHeadAttention, {**common, "num_shards": T, **ways}
    masked = layers.Masking()(context)
    y = make(**common)(x, masked)
    y = make(**common, use_bias=False, dropout=0.3, seed=2)(y, y, use_causal_mask=True)
    return keras.Model([x, context], y)


def language_model(T: int | None, **ways: Any) -> keras.Model:
    """Ends in the cross-entropy of logits that are made with tied weights."""
    tokens = keras.Input((5,), dtype="int32")
    targets = keras.Input((5,), dtype="int32")
    if T is None:
        embedding = layers.ReversibleEmbedding(VOCABULARY, 12, mask_zero=True)
        attend, norm = layers.MultiHeadAttention(12, 3), layers.LayerNormalization()
    else:
        embedding = TPEmbedding(VOCABULARY, 12, mask_zero=True, num_shards=T)
        attend = TPMultiHeadAttention(12, key_dim=3, num_shards=T, **ways)
        norm = TPLayerNormalization(num_shards=T)
    x = embedding(tokens)
    x = norm(layers.Add()([x, attend(x, x)]))
    if T is None:
        losses = CrossEntropy()(embedding(x, reverse=True), targets)
    else:
        losses = embedding(x, targets)
    return keras.Model([tokens, targets], [losses, embedding(x, reverse=True)])


def classifier(T: int | None, **ways: Any) -> keras.Model:
    """Ends in the cross-entropy of logits of a layer of its own."""
    x, targets = keras.Input((5,)), keras.Input((), dtype="int32")
    if T is None:
        return keras.Model([x, targets], CrossEntropy()(layers.Dense(12)(x), targets))
    logits = TPDense(12, num_shards=T, gather_output=False, **ways)(x)
    return keras.Model([x, targets], TPCrossEntropy(num_shards=T)(logits, targets))


class CrossEntropy(layers.Layer):
    """Keras' loss as a layer."""

    def call(self, logits, targets):
        wide = keras.backend.result_type(logits.dtype, "float32")
        return keras.losses.sparse_categorical_crossentropy(
            targets, keras.ops.cast(logits, wide), from_logits=True
        )


def normal(*shapes: Sequence[int]) -> Callable[[int], Any]:
    def data(rows: int) -> Any:
        rng = np.random.default_rng(1)
        made = [
            rng.standard_normal((rows, *shape)).astype(keras.config.floatx())
            for shape in shapes
        ]
        made[-1][:, 0] = 0.0  # What `Masking` masks.
        return made if len(made) > 1 else made[0]

    return data


def features_and_targets(rows: int) -> list[np.ndarray]:
    targets = np.random.default_rng(2).integers(0, 12, rows, dtype=np.int32)
    return [normal((5,))(rows), targets]


def tokens(rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return list(rng.integers(0, VOCABULARY, (2, rows, 5), dtype=np.int32))


CASES = {
    "columns_and_rows": Case(columns_and_rows, normal((12,))),
    "all_in_parts": Case(all_in_parts, normal((5, 12))),
    "mlp": Case(mlp, normal((5, 7))),
    "attention": Case(attention, normal((5, 6), (7, 8))),
    "classifier": Case(classifier, features_and_targets),
    "language_model": Case(language_model, tokens),
}

# Of single layers of Keras': its files name groups after classes.
CASES_IN_FILES = ("columns_and_rows", "all_in_parts", "attention", "classifier")


def assert_same(
    plain: keras.Model,
    sharded: keras.Model,
    x: Any,
    T: int,
    *,
    rtol: float,
    atol: float,
    **arguments: Any,
) -> None:
    """Asserts that outputs, masks and every gradient are equal, padding's zero."""
    a = compare.run(plain, x, **{**arguments, "graph": False})
    b = compare.run(sharded, x, **arguments)
    shards = Shards(plain.trainable_variables, sharded.trainable_variables, T)
    gradients = shards.joined([*b.weight_grads.values()])
    merged = {}
    for (name, expected), found in zip(a.weight_grads.items(), gradients, strict=True):
        kept = tuple(map(slice, expected.shape))
        merged[name] = found[kept]
        assert np.count_nonzero(found) == np.count_nonzero(merged[name]), name
    b = dataclasses.replace(b, weight_grads=merged, state=a.state)
    compare.assert_same(a, b, rtol=rtol, atol=atol)


def gradients(model: keras.Model, x: Any) -> tf.types.experimental.ConcreteFunction:
    """Returns the function of a model's outputs and gradients, traced."""

    def step(*inputs: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([tensor for tensor in inputs if tensor.dtype.is_floating])
            y = model(list(inputs) if isinstance(x, list) else inputs[0], training=True)
            total = compare.squares(y)
        return y, tape.gradient(total, [*inputs, *model.trainable_variables])

    specs = [tf.TensorSpec(a.shape, a.dtype) for a in keras.tree.flatten(x)]
    return tf.function(step).get_concrete_function(*specs)
