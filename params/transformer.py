"""The layers of a decoder-only transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import keras

import tfgpipe
from params.segments import places, same

if TYPE_CHECKING:
    from tfgpipe.quantization import QuantizeConfig


@keras.saving.register_keras_serializable(package="params")
class Positions(keras.layers.Layer):
    """Adds a learnt vector to each position, counted from its document's start.

    Call arguments:
        inputs: Of the shape below.
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
        return inputs + keras.ops.take(self.vectors, places(segments), axis=0)


@keras.saving.register_keras_serializable(package="params")
class Block(keras.layers.Layer):
    """Causal self-attention, then a perceptron, each behind a norm and a skip.

    Args:
        width: Numbers in a position's vector.
        num_heads: Heads of the attention; they share the width.
        mlp_width: Width of the perceptron's inner layer.
        dropout: Share of activations dropped before each addition.
        num_shards: T, over how many devices attention and perceptron are spread.
        sharding: How these exchange what they need: see `tfgpipe.layers.TPDense`.

    Call arguments:
        inputs: Of the shape below.
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
        sharding: Literal["sync", "ring"] = "sync",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.width = width
        self.num_heads = num_heads
        self.mlp_width = mlp_width
        self.dropout = dropout
        self.num_shards = num_shards
        self.sharding = sharding
        self.attention_norm = keras.layers.LayerNormalization()
        self.mlp_norm = keras.layers.LayerNormalization()
        size = width // num_heads
        if num_shards == 1:
            self.attention = keras.layers.MultiHeadAttention(num_heads, size)
            self.widen = keras.layers.Dense(mlp_width, activation="gelu")
            self.narrow = keras.layers.Dense(width)
        else:
            collective: Literal["gather", "ring"]
            collective = "ring" if sharding == "ring" else "gather"
            self.attention = tfgpipe.layers.TPMultiHeadAttention(
                num_heads, key_dim=size, collective=collective, num_shards=num_shards
            )
            self.widen = tfgpipe.layers.TPDense(
                mlp_width,
                activation="gelu",
                gather_output=False,
                collective=collective,
                num_shards=num_shards,
            )
            self.narrow = tfgpipe.layers.TPDense(
                width, partition="row", collective=collective, num_shards=num_shards
            )
        self.drop_attention = keras.layers.Dropout(dropout)
        self.drop_mlp = keras.layers.Dropout(dropout)

    @property
    def max_shards(self) -> int:
        """T divides it: the heads."""
        return self.num_heads

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Builds the layers inside."""
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.mlp_norm.build(input_shape)
        self.widen.build(input_shape)
        self.narrow.build(self.widen.compute_output_shape(input_shape))

    def call(
        self, inputs: Any, segments: Any = None, training: bool | None = None
    ) -> Any:
        """Returns the inputs with what attention and perceptron add."""
        # [batch_size, length, width] throughout
        normed = self.attention_norm(inputs)
        mask = None if segments is None else same(segments)
        attended = self.attention(
            normed, normed, attention_mask=mask, use_causal_mask=True
        )
        x = inputs + self.drop_attention(attended, training=training)
        added = self.narrow(self.widen(self.mlp_norm(x)))
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
        }


def quantize_rules() -> dict[type, QuantizeConfig]:
    """Returns what of these layers is quantized for 8 bits.

    Their matrices and what they give. In between attention and norms compute with
    floats, as TFLite does unless it is shown inputs.
    """
    from tfgpipe.quantization import QuantizeConfig

    return {
        Positions: QuantizeConfig(weights=["vectors"], output=True),
        Block: QuantizeConfig(weights=["kernel"], output=True),
    }
