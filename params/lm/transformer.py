"""Decoder-only transformers, whole or in shards, of packed documents as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import keras

import tfgpipe

if TYPE_CHECKING:
    from tfgpipe.quantization import QuantizeConfig
    from tfgpipe_params.lm.sizes import Transformer


ops = keras.ops
Sharding = Literal["gather", "ring", "sequence"]


@keras.saving.register_keras_serializable(package="params")
class DocumentIds(keras.layers.Layer):
    """Numbers the documents of a window, each from its start on.

    Args:
        start: The id that starts each document.

    Input shape:
        `(batch_size, length)`, ids of tokens.

    Output shape:
        The same, of type int64.

    Example:

    >>> from tfgpipe_params.lm.transformer import DocumentIds
    >>> print(DocumentIds()(np.array([[0, 65, 66, 0, 67]])).numpy())
    [[1 1 1 2 2]]
    """

    config_is_complete = True

    def __init__(self, *, start: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start = start

    def call(self, inputs: Any) -> Any:
        """Returns the number of each token's document."""
        starts = ops.cast(ops.equal(inputs, self.start), "int32")
        # TensorFlow passes int32 from stage to stage in the memory of the host.
        return ops.cast(ops.cumsum(starts, axis=1), "int64")

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "start": self.start}


def same_document_mask(segments: Any) -> Any:
    """Returns a mask of pairs in one document, `[batch_size, length, length]`."""
    return ops.equal(segments[:, :, None], segments[:, None, :])


def position_in_document(segments: Any) -> Any:
    """Returns the position of each token in its document.

    >>> print(position_in_document(ops.array([[1, 1, 1, 2, 2]])).numpy())
    [[0 1 2 0 1]]

    Args:
        segments: Numbers of documents. # [batch_size, length]
    """
    before = ops.tril(ops.cast(same_document_mask(segments), "int32"), k=-1)
    return ops.sum(before, axis=-1)


@keras.saving.register_keras_serializable(package="params")
class Positions(keras.layers.Layer):
    """Adds a learnt vector to each position, counted from its document's start.

    Call arguments:
        inputs: Tensors of the shape below.
        segments: Numbers of documents, `(batch_size, length)`; None: all is one.

    Input shape:
        `(batch_size, length, width)`, `length` known.

    Output shape:
        The same.
    """

    config_is_complete = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the vectors."""
        self.vectors = self.add_weight(
            shape=input_shape[1:],
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="vectors",
        )

    def call(self, inputs: Any, segments: Any = None) -> Any:
        """Returns the inputs with the vectors added."""
        if segments is None:
            return inputs + self.vectors
        return inputs + keras.ops.take(
            self.vectors, position_in_document(segments), axis=0
        )


@keras.saving.register_keras_serializable(package="params")
class Block(keras.layers.Layer):
    """Causal self-attention, then a perceptron, each behind a norm and a skip.

    Args:
        width: Numbers in a position's vector.
        num_heads: Heads of the attention; they share the width.
        mlp_width: Width of the perceptron's inner layer.
        dropout: Share of activations dropped before each addition.
        num_shards: T, the number of devices of attention and perceptron.
        sharding: Communication between these: see `tfgpipe.layers.TPDense`. With
            `"sequence"` attention is over T parts of the sequence.
        num_experts: Number of perceptrons, of which each position takes some.
        experts_per_token: Number of those.
        balancing: Weight of the loss that balances them.

    Call arguments:
        inputs: Tensors of the shape below.
        segments: Numbers of documents, `(batch_size, length)`, which do not see each
            other; None: all is one.

    Input shape:
        `(batch_size, length, width)`

    Output shape:
        The same.
    """

    config_is_complete = True

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        mlp_width: int,
        dropout: float = 0.0,
        num_shards: int = 1,
        sharding: Sharding = "gather",
        num_experts: int = 1,
        experts_per_token: int = 2,
        balancing: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.width = width
        self.num_heads = num_heads
        self.mlp_width = mlp_width
        self.dropout = dropout
        self.num_shards = num_shards
        self.sharding = sharding
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.balancing = balancing
        self.attention_norm = keras.layers.LayerNormalization()
        self.mlp_norm = keras.layers.LayerNormalization()
        self.attention = self._make_attention()
        if num_experts > 1:
            self.experts = self._make_experts()
        else:
            self.widen, self.narrow = self._make_mlp()
        self.drop_attention = keras.layers.Dropout(dropout)
        self.drop_mlp = keras.layers.Dropout(dropout)

    @property
    def max_shards(self) -> int:
        """T divides it: the heads."""
        return self.num_heads

    @property
    def _parts(self) -> dict[str, Any]:
        """Arguments of layers in parts."""
        collective = "ring" if self.sharding == "ring" else "gather"
        return {"collective": collective, "num_shards": self.num_shards}

    def _make_attention(self) -> keras.layers.Layer:
        heads, size = self.num_heads, self.width // self.num_heads
        if self.num_shards == 1:
            return keras.layers.MultiHeadAttention(heads, size)
        if self.sharding == "sequence":
            return tfgpipe.layers.TPSequenceAttention(
                heads, key_dim=size, num_shards=self.num_shards
            )
        return tfgpipe.layers.TPMultiHeadAttention(heads, key_dim=size, **self._parts)

    def _make_experts(self) -> keras.layers.Layer:
        return tfgpipe.layers.TPMixtureOfExperts(
            self.num_experts,
            hidden_units=self.mlp_width,
            top_k=self.experts_per_token,
            activation="gelu",
            gated=False,
            balancing=self.balancing,
            num_shards=self.num_shards,
        )

    def _make_mlp(self) -> tuple[keras.layers.Layer, keras.layers.Layer]:
        """Returns the two layers of the perceptron."""
        width, inner = self.width, self.mlp_width
        dense: Any = keras.layers.Dense
        if self.num_shards == 1:
            return dense(inner, activation="gelu"), dense(width)
        dense = tfgpipe.layers.TPDense
        return (
            dense(inner, activation="gelu", gather_output=False, **self._parts),
            dense(width, partition="row", **self._parts),
        )

    @property
    def _mlp(self) -> list[keras.layers.Layer]:
        """The layers behind the second norm."""
        return [self.experts] if self.num_experts > 1 else [self.widen, self.narrow]

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Builds the layers inside."""
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.mlp_norm.build(input_shape)
        shape: Any = input_shape
        for layer in self._mlp:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)

    def call(
        self, inputs: Any, segments: Any = None, training: bool | None = None
    ) -> Any:
        """Returns the inputs with what attention and perceptron add."""
        # [batch_size, length, width] throughout
        normed = self.attention_norm(inputs)
        mask = None if segments is None else same_document_mask(segments)
        attended = self.attention(
            normed, normed, attention_mask=mask, use_causal_mask=True
        )
        x = inputs + self.drop_attention(attended, training=training)
        added = self.mlp_norm(x)
        for layer in self._mlp:
            added = layer(added)
        return x + self.drop_mlp(added, training=training)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "width": self.width,
            "num_heads": self.num_heads,
            "mlp_width": self.mlp_width,
            "dropout": self.dropout,
            "num_shards": self.num_shards,
            "sharding": self.sharding,
            "num_experts": self.num_experts,
            "experts_per_token": self.experts_per_token,
            "balancing": self.balancing,
        }


def quantize_rules() -> dict[type, QuantizeConfig]:
    """Returns the configurations of these layers for 8 bits.

    Their matrices and what they give. In between attention and norms compute with
    floats, as TFLite does unless it is shown inputs.
    """
    from tfgpipe.quantization import QuantizeConfig

    return {
        Positions: QuantizeConfig(weights=["vectors"], output=True),
        Block: QuantizeConfig(weights=["kernel"], output=True),
    }


def decoder_only(
    hyper: Transformer,
    *,
    vocabulary_size: int = 256,
    start: int | None = None,
    num_shards: int = 1,
    sharding: Sharding = "gather",
    vocabulary: tfgpipe.layers.SplitVocabulary | None = None,
    predicts: bool = True,
) -> keras.Model:
    """Returns the network, from tokens to logits.

    A tied softmax shares its weights with the embedding, over all stages between. Of
    packed documents the numbers go from the first stage to each block.

    Args:
        hyper: Its sizes.
        vocabulary_size: Number of tokens.
        start: The id that starts each document of a window; they do not see each other.
            None: a window is one text.
        num_shards: T, the number of devices of each block.
        sharding: Communication between these: see `tfgpipe.layers.TPDense`.
        vocabulary: The softmax, and a tied embedding, in parts. None for whole ones.
        predicts: False for a network with a vocabulary in parts from tokens and targets
            to the losses of all positions.
    """
    layers = keras.layers
    numbered: list[Any] = [
        Positions(),
        *(
            Block(
                width=hyper.width,
                num_heads=hyper.num_heads,
                mlp_width=hyper.mlp_width,
                dropout=hyper.dropout,
                num_shards=num_shards,
                sharding=sharding,
                num_experts=hyper.num_experts,
                experts_per_token=hyper.experts_per_token,
                balancing=hyper.balancing,
            )
            for _ in range(hyper.num_layers)
        ),
    ]
    norm = layers.LayerNormalization()
    tied = hyper.softmax == "tied"
    kind: Any = layers.ReversibleEmbedding if tied else layers.Embedding
    embedding = kind(vocabulary_size, hyper.width)
    head = None if tied else layers.Dense(vocabulary_size)
    if vocabulary is not None and tied:
        embedding = vocabulary.embed
    inputs = keras.Input([hyper.context], dtype="int32")
    sides = {} if start is None else {"segments": DocumentIds(start=start)(inputs)}
    x = embedding(inputs)  # [batch_size, context, width]
    for layer in numbered:
        x = layer(x, **sides)
    x = norm(x)
    if vocabulary is None:
        logits = embedding(x, reverse=True) if head is None else head(x)
        return keras.Model(inputs, logits)
    if predicts:
        return keras.Model(inputs, vocabulary.logits(x))
    targets = keras.Input([hyper.context], dtype="int32")
    return keras.Model([inputs, targets], vocabulary.cross_entropy(x, targets))
