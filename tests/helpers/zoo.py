"""Whole Keras models that the comparisons run on, one for each kind of trouble.

`layer_stacks` holds the lists of layers; here are graphs: branches, skips, several
inputs and outputs, layers used twice, masks, and structures that are no plain tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, pairwise
from tests.helpers.layer_stacks import REMAT_MODES
from tests.helpers.reference import OneAfterAnother

layers = keras.layers
ops = keras.ops

IDS = 9  # Size of the vocabulary; zero is padding where something masks.


@dataclasses.dataclass(frozen=True)
class Animal:
    """A factory of models, with the data to feed them.

    Attributes:
        make: Makes the model, of at least four calls.
        data: Makes a number of input rows, in the structure that the model takes.
        rowwise: Whether a row's result is independent of the other rows in its batch,
            and of how many came before; if so any M gives what the plain model gives.
        unknown_axes: How many of the first axes may be of a size that is not known.
    """

    make: Callable[[], keras.Model]
    data: Callable[[int], Any]
    rowwise: bool = True
    unknown_axes: int = 1


def floats(rows: int, *shape: int, seed: int = 1) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, *shape))
    return values.astype(keras.config.floatx())


def ids(rows: int, *shape: int, seed: int = 1) -> np.ndarray:
    """Draws ids of which none is padding."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, IDS, (rows, *shape), dtype=np.int32)


def padded_ids(rows: int, length: int, seed: int = 1) -> np.ndarray:
    """Draws ids, row after row shorter, then padded with zeros; none is empty."""
    lengths = 1 + (np.arange(rows) * 2 + seed) % length
    return np.where(
        np.arange(length) < lengths[:, None], ids(rows, length, seed=seed), 0
    ).astype(np.int32)


# -- branches and skips ---------------------------------------------------------------


def u_net(norm: bool = False) -> keras.Model:
    """Down twice, up twice; each level's skip crosses all that is below it."""

    def block(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
        x = layers.Conv2D(filters, 3, padding="same", use_bias=not norm)(x)
        if norm:
            x = layers.BatchNormalization(momentum=0.9)(x)
            x = layers.SpatialDropout2D(0.2, seed=5)(x)
        return layers.Activation("gelu")(x)

    x = inputs = keras.Input((8, 8, 2))
    skips = []
    for filters in (3, 4):
        x = block(x, filters)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = block(x, 5)
    for filters, skip in zip((4, 3), reversed(skips), strict=True):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = layers.Concatenate()([skip, x])
        x = block(x, filters)
    return keras.Model(inputs, layers.Conv2D(2, 1)(x))


def u_net_normalised() -> keras.Model:
    return u_net(norm=True)


def skips() -> keras.Model:
    """Widths that no two values share, so that a value is known by its shape."""
    inputs = keras.Input((5,))
    a = layers.Dense(6, activation="tanh")(inputs)
    b = layers.Dense(7, activation="tanh")(a)
    c = layers.Dense(8, activation="tanh")(b)
    d = layers.Concatenate()([c, a])
    return keras.Model(inputs, layers.Dense(3)(d))


def operations() -> keras.Model:
    """`keras.ops` between layers: slices, lists, several results, plain numbers."""
    inputs = keras.Input((6, 4))
    x = layers.Dense(8)(inputs)
    halves = ops.split(x, 2, axis=-1)
    gated = halves[0] * ops.sigmoid(halves[1])
    x = ops.concatenate([gated, 0.5 - inputs, x[:, :, :3]], axis=-1)
    x = layers.Conv1D(5, 3, padding="causal")(x)
    top = ops.max(x, axis=1, keepdims=True)
    x = ops.einsum("bsd,bsd->bsd", x / (1.0 + ops.abs(top)), ops.flip(x, axis=1))
    x = ops.reshape(x, (-1, 30))[:, ::2] @ ops.ones((15, 4))
    return keras.Model(inputs, layers.Dense(3)(x))


# -- sequences ------------------------------------------------------------------------


def attention(**arguments: Any) -> keras.layers.Layer:
    return layers.MultiHeadAttention(2, 3, **arguments)


def encoder_decoder() -> keras.Model:
    """A transformer: padding masks, a causal decoder, one memory read in many places.

    The masks come from the embeddings and reach the attention layers as Keras masks.
    """

    def feed_forward(x: keras.KerasTensor) -> keras.KerasTensor:
        inner = layers.Dense(6, activation="relu")(x)
        return layers.LayerNormalization()(layers.Add()([x, layers.Dense(4)(inner)]))

    source = keras.Input((5,), dtype="int32", name="source")
    target = keras.Input((4,), dtype="int32", name="target")
    memory = layers.Embedding(IDS, 4, mask_zero=True)(source)
    memory = layers.Add()([memory, attention()(memory, memory)])
    memory = feed_forward(memory)
    x = layers.Embedding(IDS, 4, mask_zero=True)(target)
    for _ in range(2):
        x = layers.Add()([x, attention()(x, x, use_causal_mask=True)])
        x = layers.Add()([x, attention()(query=x, value=memory)])
        x = feed_forward(x)
    return keras.Model([source, target], layers.Dense(IDS)(x))


def explicit_masks() -> keras.Model:
    """Tensors as keyword arguments, made by operations stages before."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    segments = keras.Input((None,), dtype="int32", name="segments")
    present = ops.not_equal(tokens, 0)
    together = ops.equal(segments[:, :, None], segments[:, None, :])
    allowed = ops.logical_and(together, present[:, None, :])
    x = layers.Embedding(IDS, 4)(tokens)
    for _ in range(2):
        x = x + attention()(x, x, attention_mask=allowed)
    x = layers.LSTM(3, return_sequences=True)(x, mask=present)
    return keras.Model([tokens, segments], layers.Dense(2)(x))


def lstm() -> keras.Model:
    x = inputs = keras.Input((None, 3))
    x = layers.LSTM(4, return_sequences=True)(x)
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
    x = layers.LSTM(4)(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def gru() -> keras.Model:
    x = inputs = keras.Input((None, 3))
    x = layers.GRU(4, return_sequences=True)(x)
    x = layers.Bidirectional(layers.GRU(3), merge_mode="sum")(x)
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(5)(x)))


def states_handed_on() -> keras.Model:
    """Layers of several outputs, one's the keyword argument of the next."""
    inputs = keras.Input((None, 3))
    x, hidden, cell = layers.LSTM(4, return_sequences=True, return_state=True)(inputs)
    x = layers.Dense(3, activation="tanh")(x)
    y = layers.LSTM(4)(x, initial_state=[hidden, cell])
    return keras.Model(inputs, layers.Dense(2)(y))


def masked() -> keras.Model:
    """A mask made first and needed last, past layers that only hand it on."""
    x = inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(IDS, 4, mask_zero=True)(x)
    x = layers.Dense(5, activation="tanh")(x)
    x = layers.Dropout(0.0)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.LSTM(3)(x)))


def masked_tokens() -> keras.Model:
    """A score for each id at each place, a mask on the scores."""
    x = inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(IDS, 4, mask_zero=True)(x)
    x = layers.GRU(4, return_sequences=True)(x)
    x = layers.Dense(5, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(IDS)(x))


def masked_outputs() -> keras.Model:
    """Two outputs with masks of their own, one with the mask taken off, one without."""
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    values = keras.Input((4, 3), name="values")
    x = layers.Embedding(IDS, 4, mask_zero=True)(tokens)
    y = layers.Masking()(values)
    x = layers.Dense(3, name="from_tokens")(x)
    y = layers.LSTM(3, return_sequences=True, name="from_values")(y)
    last = layers.GlobalAveragePooling1D(name="mean")(x)
    none = ops.tanh(layers.Dense(2)(y))
    return keras.Model([tokens, values], [x, y, last, none])


# -- several inputs and outputs -------------------------------------------------------


def two_in_two_out() -> keras.Model:
    a = keras.Input((4,), name="a")
    b = keras.Input((3,), name="b")
    x = layers.Dense(6, activation="tanh")(a)
    y = layers.Dense(5, activation="tanh")(b)
    x = layers.Concatenate()([x, y, a])
    trunk = layers.Dense(6, activation="relu")(x)
    price = layers.Dense(1, name="price")(trunk)
    kind = layers.Dense(3, activation="softmax", name="kind")(
        layers.Concatenate()([trunk, y])
    )
    return keras.Model([a, b], [price, kind])


def dicts() -> keras.Model:
    inputs = {"b": keras.Input((3,), name="b"), "a": keras.Input((4,), name="a")}
    x = layers.Dense(5, activation="tanh")(inputs["a"])
    y = layers.Dense(5)(inputs["b"])
    z = layers.Dense(4)(layers.Multiply()([x, y]))
    return keras.Model(inputs, {"z": layers.Dense(2, name="last")(z), "early": y})


def tuples() -> keras.Model:
    """Nested both ways, with an output that goes on, one wanted twice, an integer."""
    a, b, c = (keras.Input((4,), name=name) for name in "abc")
    x = layers.Dense(4, activation="tanh")(a)
    y = layers.Dense(4)(layers.Add()([x, b]))
    z = layers.Dense(3)(layers.Subtract()([y, c]))
    return keras.Model(
        (a, [b, c]), (x, {"y": (y, x), "best": ops.argmax(z, axis=-1)}, [z])
    )


def singles() -> keras.Model:
    """Tuples of one, in and out."""
    inputs = keras.Input((4,))
    x = layers.Dense(5, activation="tanh")(inputs)
    x = layers.Dense(4)(layers.Dense(3)(x))
    return keras.Model((inputs,), (layers.Dense(2)(x),))


def optional() -> keras.Model:
    """An input that may be None: the layer that takes it sees that."""
    a = keras.Input((4,), name="a")
    b = keras.Input((4,), name="b", optional=True)
    x = layers.Dense(4, activation="tanh")(a)
    x = AddsIfThere()([x, b])
    return keras.Model([a, b], layers.Dense(2)(layers.Dense(4)(x)))


def passed_through() -> keras.Model:
    """Inputs that are outputs as they are, one of them also used."""
    a = keras.Input((4,), name="a")
    b = keras.Input((3,), dtype="int32", name="b")
    x = layers.Dense(4, activation="tanh")(a)
    x = layers.Dense(3)(layers.Dense(5)(x))
    return keras.Model([a, b], [a, x, b, layers.Multiply()([x, a[:, :3]])])


# -- layers used twice ----------------------------------------------------------------


def siamese() -> keras.Model:
    """One encoder, a model itself, on two inputs, with much in between."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(6, activation="tanh", kernel_regularizer="l2")(inputs)
    last = layers.Dense(3, activity_regularizer="l1")
    encoder = keras.Model(inputs, last(hidden), name="encoder")
    a = keras.Input((4,), name="a")
    b = keras.Input((4,), name="b")
    x = encoder(a)
    y = layers.Dense(4, activation="tanh")(layers.Concatenate()([x, b]))
    y = encoder(y)
    return keras.Model([a, b], [layers.Dense(2)(layers.Multiply()([x, y])), x])


def siamese_normalised() -> keras.Model:
    """Statistics and seeds advance once for each use."""
    encoder = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4),
            layers.BatchNormalization(momentum=0.9),
            layers.Dropout(0.3, seed=7),
        ]
    )
    a = keras.Input((4,), name="a")
    b = keras.Input((4,), name="b")
    x = layers.Concatenate()([encoder(layers.Dense(4)(a)), a, encoder(b)])
    return keras.Model([a, b], layers.Dense(2)(layers.Dense(3)(x)))


class Projection(layers.Layer):
    """Uses the weights of an embedding to score each id."""

    def __init__(self, embedding: keras.layers.Embedding, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


def tied_layer() -> keras.Model:
    inputs = keras.Input((5,), dtype="int32")
    embedding = layers.Embedding(IDS, 4, name="tied")
    x = layers.Dense(6, activation="tanh")(embedding(inputs))
    x = layers.Dense(4)(x)
    return keras.Model(inputs, layers.Softmax()(Projection(embedding)(x)))


def tied_reversible() -> keras.Model:
    inputs = keras.Input((5,), dtype="int32")
    embedding = layers.ReversibleEmbedding(IDS, 4, name="tied")
    x = layers.Dense(6, activation="tanh")(embedding(inputs))
    x = layers.Dense(4)(x)
    return keras.Model(inputs, layers.Softmax()(embedding(x, reverse=True)))


def tied_by_operation() -> keras.Model:
    """The weight of a layer handed to an operation of the graph."""
    inputs = keras.Input((5,), dtype="int32")
    embedding = layers.Embedding(IDS, 4, name="tied")
    embedding.build(None)
    x = layers.Dense(6, activation="tanh")(embedding(inputs))
    x = layers.Dense(4)(x)
    scores = ops.einsum("bsd,vd->bsv", x, embedding.embeddings)
    return keras.Model(inputs, layers.Softmax()(scores))


def tied_by_function() -> keras.Model:
    """The weight of a layer used by a function that no layer tells of."""
    inputs = keras.Input((5,), dtype="int32")
    embedding = layers.Embedding(IDS, 4, name="tied")
    x = layers.Dense(6, activation="tanh")(embedding(inputs))
    x = layers.Dense(4)(x)
    scores = layers.Lambda(
        lambda x: tf.matmul(x, tf.transpose(tf.convert_to_tensor(embedding.embeddings)))
    )(x)
    return keras.Model(inputs, layers.Softmax()(scores))


def frozen_and_shared() -> keras.Model:
    shared = layers.Dense(4, activation="tanh", name="shared")
    inputs = keras.Input((4,))
    x = layers.Dense(4)(shared(inputs))
    model = keras.Model(inputs, layers.Dense(2)(shared(x)))
    shared.trainable = False
    return model


# -- models in models -----------------------------------------------------------------


def nested() -> keras.Model:
    """Functional in Sequential in Functional, beside Sequential in Functional."""

    def inner_model() -> keras.Model:
        inputs = keras.Input((4,))
        x = layers.Dense(5, activation="tanh")(inputs)
        return keras.Model(inputs, [layers.Dense(4)(x), x])

    class First(layers.Layer):
        def call(self, pair: list[tf.Tensor]) -> tf.Tensor:
            return pair[0]

    innermost = keras.Input((4,))
    functional = keras.Model(innermost, First()(inner_model()(innermost)))
    middle = keras.Sequential([keras.Input((4,)), functional, layers.Dense(4)])
    tail = keras.Sequential([layers.Dense(3, activation="relu"), layers.Dense(2)])
    inputs = keras.Input((4,))
    x = layers.Add()([middle(inputs), inputs])
    y, z = inner_model()(x)
    return keras.Model(inputs, [tail(y), z])


def sequential() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="tanh"),
            keras.Sequential([layers.Dense(4), layers.LayerNormalization()]),
            layers.Dense(2),
        ]
    )


def nested_and_masked() -> keras.Model:
    """An inner model that reads a mask and one that hands it on."""
    inner = keras.Input((5, 4))
    reads = keras.Model(inner, layers.Dense(3)(layers.GRU(3)(inner)))
    inner = keras.Input((5, 4))
    hands_on = keras.Model(inner, layers.Dense(4, activation="tanh")(inner))
    inputs = keras.Input((5,), dtype="int32")
    x = hands_on(layers.Embedding(IDS, 4, mask_zero=True)(inputs))
    return keras.Model(inputs, [layers.Dense(2)(reads(x)), layers.Dense(2)(x)])


def transfer() -> keras.Model:
    """A frozen base with statistics, called as one does when tuning what is on top."""
    base_inputs = keras.Input((4,))
    x = layers.Dense(5)(base_inputs)
    x = layers.BatchNormalization()(x)
    base = keras.Model(base_inputs, layers.Dropout(0.3, seed=1)(x), name="base")
    base.trainable = False
    inputs = keras.Input((4,))
    x = base(layers.Dense(4)(inputs), training=False)
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(3)(x)))


# -- control flow ---------------------------------------------------------------------


class AddsIfThere(layers.Layer):
    """Adds its second input to its first, if there is one."""

    def call(self, pair: list[tf.Tensor | None]) -> tf.Tensor:
        first, second = pair
        return first if second is None else first + second

    def compute_output_shape(self, shapes: Any) -> Any:
        return shapes[0]


class Weighs(layers.Layer):
    """A weight, for layers whose control flow is to have one inside."""

    def build(self, shape: tuple) -> None:
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones", name="w")


class Branches(Weighs):
    """`tf.cond` on what is in the batch, row by row so that the split does not tell."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        w = tf.convert_to_tensor(self.w)

        def one(row: tf.Tensor) -> tf.Tensor:
            return tf.cond(
                tf.reduce_sum(row) > 0.0, lambda: row * w, lambda: tf.square(row) - w
            )

        return tf.map_fn(one, x)

    def compute_output_spec(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor(x.shape, x.dtype)


class Loops(Weighs):
    """`tf.while_loop`, its trips known only from the data."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        w = 0.1 * tf.convert_to_tensor(self.w)
        start = tf.constant(0)
        _, y = tf.while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y + w) * y), (start, x)
        )
        return y

    def compute_output_spec(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor(x.shape, x.dtype)


class Autographed(Weighs):
    """Python's own `for` and `if` on tensors, in an inner `tf.function`."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return autographed(x, tf.convert_to_tensor(self.w))

    def compute_output_spec(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor(x.shape, x.dtype)


@tf.function
def autographed(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    total = tf.zeros_like(x)
    for i in tf.range(tf.shape(x)[1]):
        column = x[:, i : i + 1]
        if i % 2 == 0:
            total += column * w
        else:
            total -= tf.sin(column)
    return total


class KerasFlow(Weighs):
    """Keras' own `cond` and `while_loop`."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        few = ops.shape(x)[1] < 100
        x = ops.cond(few, lambda: x * self.w, lambda: x - self.w)
        _, y = ops.while_loop(
            lambda i, y: i < 2, lambda i, y: (i + 1, ops.sin(y * self.w)), (0, x)
        )
        return y

    def compute_output_spec(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor(x.shape, x.dtype)


def control_flow(kind: type[Weighs]) -> keras.Model:
    x = inputs = keras.Input((4,))
    x = layers.Dense(4)(x)
    x = kind()(x)
    x = layers.Dense(4, activation="tanh")(x)
    x = kind()(x)
    return keras.Model(inputs, layers.Dense(2)(x))


# -- side inputs ----------------------------------------------------------------------


class Forgets(layers.Layer):
    """Sets what lies beyond each row's length to zero: `lengths` `[B]`, integers."""

    def call(self, x: tf.Tensor, lengths: tf.Tensor | None = None) -> tf.Tensor:
        if lengths is None:
            return x
        within = tf.sequence_mask(lengths, tf.shape(x)[1], dtype=x.dtype)
        return x * within[:, :, None]

    def compute_output_spec(self, x: keras.KerasTensor, **_: Any) -> keras.KerasTensor:
        return keras.KerasTensor(x.shape, x.dtype)


class Attends(layers.Layer):
    """Attention within segments: `segment_ids` `[B, S]`, `allowed` `[B, S]` boolean."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = attention()

    def build(self, shape: tuple) -> None:
        self.attention.build(shape, shape)

    def call(
        self,
        x: tf.Tensor,
        segment_ids: tf.Tensor | None = None,
        allowed: tf.Tensor | None = None,
    ) -> tf.Tensor:
        together = ops.equal(segment_ids[:, :, None], segment_ids[:, None, :])
        if allowed is not None:
            together = ops.logical_and(together, allowed[:, None, :])
        return x + self.attention(x, x, attention_mask=together)


class Scales(layers.Layer):
    """Multiplies each row by a number: `scale` `[B]`, floats, with gradients."""

    def call(self, x: tf.Tensor, scale: tf.Tensor | None = None) -> tf.Tensor:
        return x if scale is None else x * ops.tanh(scale)[:, None, None]


def side_fed() -> list[keras.layers.Layer]:
    """Layers that ask for side inputs, some for several, some for none."""
    return [
        layers.Dense(4, activation="tanh"),
        Forgets(),
        Attends(),
        Scales(),
        layers.Conv1D(4, 3, padding="causal"),
        Attends(),
        Scales(),
        layers.Dense(2),
    ]


def side_inputs(rows: int, length: int) -> dict[str, np.ndarray]:
    return {
        "lengths": 1 + ids(rows, seed=3) % length,
        "segment_ids": ids(rows, length, seed=4) // 5,
        "allowed": ids(rows, length, seed=5) > 3,
        "scale": floats(rows, seed=6),
    }


ZOO = {
    "u_net": Animal(u_net, lambda n: floats(n, 8, 8, 2)),
    "u_net_normalised": Animal(
        u_net_normalised, lambda n: floats(n, 8, 8, 2), rowwise=False
    ),
    "skips": Animal(skips, lambda n: floats(n, 5)),
    "operations": Animal(operations, lambda n: floats(n, 6, 4)),
    "encoder_decoder": Animal(
        encoder_decoder,
        lambda n: [padded_ids(n, 5), padded_ids(n, 4, seed=2)],
    ),
    "explicit_masks": Animal(
        explicit_masks,
        lambda n: [padded_ids(n, 5), ids(n, 5, seed=2) // 4],
        unknown_axes=2,
    ),
    "lstm": Animal(lstm, lambda n: floats(n, 4, 3), unknown_axes=2),
    "gru": Animal(gru, lambda n: floats(n, 4, 3), unknown_axes=2),
    "states_handed_on": Animal(
        states_handed_on, lambda n: floats(n, 4, 3), unknown_axes=2
    ),
    "masked": Animal(masked, lambda n: padded_ids(n, 5), unknown_axes=2),
    "masked_outputs": Animal(
        masked_outputs,
        lambda n: [
            padded_ids(n, 6),
            floats(n, 4, 3) * (padded_ids(n, 4) > 0)[..., None],
        ],
    ),
    "two_in_two_out": Animal(
        two_in_two_out, lambda n: [floats(n, 4), floats(n, 3, seed=2)]
    ),
    "dicts": Animal(dicts, lambda n: {"a": floats(n, 4), "b": floats(n, 3, seed=2)}),
    "tuples": Animal(
        tuples,
        lambda n: (floats(n, 4), [floats(n, 4, seed=2), floats(n, 4, seed=3)]),
    ),
    "singles": Animal(singles, lambda n: (floats(n, 4),)),
    "optional": Animal(optional, lambda n: [floats(n, 4), floats(n, 4, seed=2)]),
    "optional_none": Animal(optional, lambda n: [floats(n, 4), None]),
    "passed_through": Animal(
        passed_through, lambda n: [floats(n, 4), ids(n, 3, seed=2)]
    ),
    "siamese": Animal(siamese, lambda n: [floats(n, 4), floats(n, 4, seed=2)]),
    "siamese_normalised": Animal(
        siamese_normalised,
        lambda n: [floats(n, 4), floats(n, 4, seed=2)],
        rowwise=False,
    ),
    "tied_layer": Animal(tied_layer, lambda n: ids(n, 5)),
    "tied_reversible": Animal(tied_reversible, lambda n: ids(n, 5)),
    "frozen_and_shared": Animal(frozen_and_shared, lambda n: floats(n, 4)),
    "nested": Animal(nested, lambda n: floats(n, 4)),
    "sequential": Animal(sequential, lambda n: floats(n, 4)),
    "nested_and_masked": Animal(nested_and_masked, lambda n: padded_ids(n, 5)),
    "transfer": Animal(transfer, lambda n: floats(n, 4), rowwise=False),
    "tf_cond": Animal(lambda: control_flow(Branches), lambda n: floats(n, 4)),
    "tf_while_loop": Animal(lambda: control_flow(Loops), lambda n: floats(n, 4)),
    "autograph": Animal(lambda: control_flow(Autographed), lambda n: floats(n, 4)),
    "keras_flow": Animal(lambda: control_flow(KerasFlow), lambda n: floats(n, 4)),
}

# -- how they are compared ------------------------------------------------------------

SETTINGS = {
    "num_stages": (1, 2, 3, 4),
    "num_microbatches": (1, 2, 3, 4, 5),
    "rows": (3, 4, 5),
    "remat": REMAT_MODES,
    "sizes": ("static", "unknown"),
    "graph": (True, False),
    "dtype": ("float32", "float64"),
}


def deal() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Deals settings to the models, like cards: two of each, of all pairs.

    Returns:
        The cases that recompute layer by layer, the most delicate way of all, and the
        others.
    """
    cases = [
        dict(zip(SETTINGS, case, strict=True)) for case in pairwise.all_pairs(SETTINGS)
    ]
    decks = (
        [case for case in cases if case["remat"] == "layer"],
        [case for case in cases if case["remat"] != "layer"],
    )
    per_layer, others = (
        [
            {"name": name, **case}
            for name, case in zip(ZOO, itertools.cycle(deck), strict=False)
        ]
        for deck in decks
    )
    return per_layer, others


def title(case: dict[str, Any]) -> str:
    """Returns the name of a case."""
    return "-".join(map(str, case.values()))


def assert_same_step(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    rows: int,
    remat: str,
    sizes: str,
    graph: bool,
    dtype: str,
) -> None:
    """Asserts that a model's step in a pipeline is that of the model."""
    animal = ZOO[name]
    plain, pipelined = compare.model_pair(
        animal.make,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        remat=remat,
    )
    x = animal.data(rows)
    specs = None
    if graph and sizes == "unknown":
        specs = compare.unknown_sizes(x, axes=animal.unknown_axes)
    if not animal.rowwise:
        plain = OneAfterAnother(plain, num_microbatches)
    expected = compare.run(plain, x, graph=False)
    received = compare.run(pipelined, x, graph=graph, specs=specs)
    assert any(np.any(grad) for grad in expected.weight_grads.values())
    rtol, atol = compare.TOLERANCES[dtype]
    compare.assert_same(expected, received, rtol=rtol, atol=atol)


def assert_application(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    training: bool,
    **arguments: Any,
) -> None:
    """Asserts the same for a model of `keras.applications`, in double precision.

    Statistics of few rows through a hundred layers: single precision tells nothing.
    """

    def make() -> keras.Model:
        application = getattr(keras.applications, name)
        return application(
            weights=None, input_shape=(32, 32, 3), classes=3, **arguments
        )

    plain, pipelined = compare.model_pair(
        make, num_stages=num_stages, num_microbatches=num_microbatches
    )
    assert len(stages(pipelined)) == num_stages
    x = floats(4, 32, 32, 3)
    # As a graph: what these models amplify includes the order of sums in one step.
    compare.assert_same(
        compare.run(plain, x, training=training, graph=training),
        compare.run(pipelined, x, training=training),
        rtol=1e-11,
        atol=1e-11,
    )


def stages(pipelined: keras.Model) -> Any:
    """Returns the stages of a model that `tfgpipe.pipeline` made."""
    kind = tfgpipe.PipelinedLayer
    return next(x for x in pipelined.layers if isinstance(x, kind)).stages
