"""The models that are measured, in Keras' own layers.

* `mlp`: 16 x Dense(1024 -> 1024) with relu, batch 512. Heavy in weights: each
  microbatch adds 67 MB of gradients.
* `transformer`: 8 pre-LN encoder blocks (d_model 256, 4 heads, MLP of 1024 with gelu,
  no dropout) on `[32, 128, 256]`. About 168 GFLOP a step.
* `decoder`: a GPT-2 of 8 causal pre-LN blocks of width 256 on `[32, 128]` of 8,192
  tokens. Its last stage is heavy: the projection costs as much as 2.5 blocks.
* `resnet50`: ResNet50 on `[32, 64, 64, 3]`, 1,000 classes.
* `translation`: 4 encoder and 4 decoder blocks of width 256 on 32 pairs of up to 64
  tokens, with padding.

All train in float32: the first two on mean squared error to a random target of the
input's shape, the others on cross-entropy to random classes or tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

import tfgpipe
from benchmarks.peers.protocol import layer_counts

if TYPE_CHECKING:
    from tfgpipe.quantization import QuantizeConfig

Layers = list[keras.layers.Layer]
Data = tuple[np.ndarray, np.ndarray]


def sequential(layers: Layers, inputs: Any) -> Any:
    """Returns the output of layers, each called on that of the one before."""
    for layer in layers:
        inputs = layer(inputs)
    return inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, with the batch it is fed.

    Attributes:
        make_layers: Returns the layers in order, not yet built.
        batch_shape: Shape of the input, the batch included.
        make_data: Returns the input and the target of every step.
        loss: Keras' loss function, or its name.
        connect: Returns the output of the layers for a symbolic input.
        layers_per_stage: By the number of stages; equal where that is not in it.
    """

    make_layers: Callable[[], Layers]
    batch_shape: tuple[int, ...]
    make_data: Callable[[], Data]
    loss: Any = "mse"
    connect: Callable[[Layers, Any], Any] = sequential
    layers_per_stage: Mapping[int, Sequence[int]] = dataclasses.field(
        default_factory=dict
    )

    def make_model(self, layers: Layers) -> keras.Model:
        """Returns the Keras model of layers that `make_layers` returned."""
        dtype = self.make_data()[0].dtype.name
        inputs = keras.Input(self.batch_shape[1:], dtype=dtype)
        return keras.Model(inputs, self.connect(layers, inputs))

    def stage_ends(self, layers: Layers, num_stages: int) -> list[str]:
        """Returns the names of the layers that end each stage but the last."""
        counts = layer_counts(len(layers), num_stages, self.layers_per_stage)
        ends = list(itertools.accumulate(counts))[:-1]
        return [layers[end - 1].name for end in ends]


class EncoderBlock(keras.layers.Layer):
    """A pre-LN transformer block without cross attention.

    Args:
        num_heads: Number of attention heads; the width of the input is divided by it.
        mlp_ratio: Width of the hidden layer of the MLP, in widths of the input.
        causal: Whether a position attends only to itself and those before.
        dropout: Rate of dropout on attention probabilities and on residual paths.
        **kwargs: Arguments of the base layer.

    Input shape:
        `[batch, length, width]`; optionally also the tokens of a translation,
        `[batch, 2, length]`, of whose source zeros, the padding, are not attended to.

    Output shape:
        The input's.
    """

    config_is_complete = True

    def __init__(
        self,
        *,
        num_heads: int = 4,
        mlp_ratio: int = 4,
        causal: bool = False,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.mlp_ratio = mlp_ratio
        self.causal = causal
        self.dropout = dropout
        self.residual_dropout = keras.layers.Dropout(dropout)

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Makes the sublayers for the width of the input."""
        *batch, width = input_shape
        self.attention_norm = keras.layers.LayerNormalization(name="attention_norm")
        self.attention = self.make_attention("attention", width)
        self.mlp_norm = keras.layers.LayerNormalization(name="mlp_norm")
        self.hidden = keras.layers.Dense(
            self.mlp_ratio * width, activation="gelu", name="hidden"
        )
        self.output_projection = keras.layers.Dense(width, name="output_projection")
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.mlp_norm.build(input_shape)
        self.hidden.build(input_shape)
        self.output_projection.build((*batch, self.mlp_ratio * width))

    def make_attention(self, name: str, width: int) -> Any:
        """Returns an attention layer with the heads and dropout of this block."""
        return keras.layers.MultiHeadAttention(
            self.num_heads, width // self.num_heads, dropout=self.dropout, name=name
        )

    def call(self, x: Any, tokens: Any = None) -> Any:
        """Attends, then transforms each position, each on a residual path."""
        return self.transform(self.attend(x, tokens))

    def attend(self, x: Any, tokens: Any = None) -> Any:
        """Adds what each position attends to."""
        y = self.attention_norm(x)
        mask = None if tokens is None else tokens[:, :1] != 0
        y = self.attention(y, y, attention_mask=mask, use_causal_mask=self.causal)
        return x + self.residual_dropout(y)

    def transform(self, x: Any) -> Any:
        """Adds what the MLP makes of each position."""
        y = self.output_projection(self.hidden(self.mlp_norm(x)))
        return x + self.residual_dropout(y)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        names = ("num_heads", "mlp_ratio", "causal", "dropout")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


class DecoderBlock(EncoderBlock):
    """A block that also attends to an encoder's output.

    Targets of a causal one need no mask: their padding comes last, where no other
    position attends to it, and the loss leaves it out.

    Input shape:
        `[batch, length, width]` of the target, the same of the encoder's output, and
        tokens, `[batch, 2, length]`, of whose source zeros are not attended to.

    Output shape:
        The first input's.
    """

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Makes the sublayers for the width of the input."""
        super().build(input_shape)
        width = input_shape[-1]
        self.cross_norm = keras.layers.LayerNormalization(name="cross_norm")
        self.cross_attention = self.make_attention("cross_attention", width)
        self.cross_norm.build(input_shape)
        self.cross_attention.build(input_shape, input_shape)

    def call(self, x: Any, memory: Any, tokens: Any) -> Any:  # type: ignore[override]
        """Attends to itself and the source, then transforms each position."""
        x = self.attend(x)
        y = self.cross_norm(x)
        y = self.cross_attention(y, memory, attention_mask=tokens[:, :1] != 0)
        return self.transform(x + self.residual_dropout(y))


class TokenEmbedding(keras.layers.Layer):
    """The sum of token and learned position embeddings.

    Args:
        vocabulary: Number of tokens.
        width: Of the embeddings.
        dropout: Its rate on the sum.
        column: Which of several texts to embed, if there are.
        **kwargs: Arguments of the base layer.

    Input shape:
        `[batch, length]`, or with a column `[batch, columns, length]`.

    Output shape:
        `[batch, length, width]`.
    """

    config_is_complete = True

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        dropout: float = 0.0,
        column: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocabulary = vocabulary
        self.width = width
        self.dropout = dropout
        self.column = column

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Makes the embeddings, of as many positions as the input has."""
        self.tokens = keras.layers.Embedding(self.vocabulary, self.width, name="tokens")
        self.tokens.build(input_shape)
        self.positions = self.add_weight(
            shape=(input_shape[-1], self.width), name="positions"
        )
        self.sum_dropout = keras.layers.Dropout(self.dropout)

    def call(self, x: Any) -> Any:
        """Embeds tokens."""
        x = x if self.column is None else x[:, self.column]
        return self.sum_dropout(self.tokens(x) + self.positions)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        names = ("vocabulary", "width", "dropout", "column")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


class Stem(keras.layers.Layer):
    """The first layers of ResNet50: convolution, batch normalization, relu, maximum.

    Padding is added before, as Keras' "same" is not symmetric for strides of 2.

    Args:
        filters: Channels of the output.
        **kwargs: Arguments of the base layer.

    Input shape:
        `[batch, height, width, channels]`.

    Output shape:
        `[batch, height / 4, width / 4, filters]`.
    """

    config_is_complete = True

    def __init__(self, *, filters: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.filters = filters

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Makes the sublayers for the input's channels."""
        self.convolution = keras.layers.Conv2D(
            self.filters, 7, strides=2, use_bias=False, name="convolution"
        )
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.convolution.build(input_shape)
        self.norm.build((None, None, None, self.filters))

    def call(self, x: Any, training: bool | None = None) -> Any:
        """Takes an image to features."""
        x = self.convolution(keras.ops.pad(x, ((0, 0), (3, 3), (3, 3), (0, 0))))
        x = keras.ops.relu(self.norm(x, training=training))
        x = keras.ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return keras.ops.max_pool(x, 3, strides=2)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        return {**super().get_config(), "filters": self.filters}


class Bottleneck(keras.layers.Layer):
    """A block of ResNet50: convolutions of 1, 3 and 1 on a residual path.

    Where the output's shape is another than the input's, the other path has a
    convolution of 1 as well. Strides are of the first convolutions, as in the paper.

    Args:
        filters: Channels of the inner convolutions; the output has four times as many.
        strides: Of the first convolution.
        **kwargs: Arguments of the base layer.

    Input shape:
        `[batch, height, width, channels]`.

    Output shape:
        `[batch, height / strides, width / strides, 4 * filters]`.
    """

    config_is_complete = True

    def __init__(self, *, filters: int, strides: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.filters = filters
        self.strides = strides

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Makes the sublayers for the input's channels."""
        F = self.filters
        self.residual = [
            *self._make_pair("1", input_shape[-1], F, 1, self.strides),
            *self._make_pair("2", F, F, 3, 1),
            *self._make_pair("3", F, 4 * F, 1, 1),
        ]
        self.shortcut = []
        if input_shape[-1] != 4 * F or self.strides != 1:
            self.shortcut = self._make_pair(
                "0", input_shape[-1], 4 * F, 1, self.strides
            )

    def _make_pair(
        self, suffix: str, channels: int, filters: int, size: int, strides: int
    ) -> list[Any]:
        """Returns a built convolution with the normalization of its output."""
        convolution = keras.layers.Conv2D(
            filters,
            size,
            strides=strides,
            padding="same",
            use_bias=False,
            name=f"convolution{suffix}",
        )
        norm = keras.layers.BatchNormalization(name=f"norm{suffix}")
        convolution.build((None, None, None, channels))
        norm.build((None, None, None, filters))
        return [convolution, norm]

    def call(self, x: Any, training: bool | None = None) -> Any:
        """Adds the residual path to the other."""
        y = x
        for number, (convolution, norm) in enumerate(
            zip(self.residual[::2], self.residual[1::2], strict=True)
        ):
            y = norm(convolution(y), training=training)
            y = y if number == 2 else keras.ops.relu(y)
        if self.shortcut:
            convolution, norm = self.shortcut
            x = norm(convolution(x), training=training)
        return keras.ops.relu(x + y)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        config = {"filters": self.filters, "strides": self.strides}
        return {**super().get_config(), **config}


class ShardedEncoderBlock(EncoderBlock):
    """The same with attention and MLP in T shards.

    Args:
        num_shards: T, which divides the heads.
        **kwargs: Arguments of `EncoderBlock`.
    """

    config_is_complete = True

    def __init__(self, *, num_shards: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_shards = num_shards

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Makes the sublayers for the width of the input."""
        width = input_shape[-1]
        self.attention_norm = keras.layers.LayerNormalization(name="attention_norm")
        self.attention = tfgpipe.layers.TPMultiHeadAttention(
            self.num_heads,
            key_dim=width // self.num_heads,
            dropout=self.dropout,
            num_shards=self.num_shards,
        )
        self.mlp_norm = keras.layers.LayerNormalization(name="mlp_norm")
        self.mlp = tfgpipe.layers.TPMLP(
            self.mlp_ratio * width, units=width, num_shards=self.num_shards
        )
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.mlp_norm.build(input_shape)
        self.mlp.build(input_shape)

    def transform(self, x: Any) -> Any:
        """Adds what the MLP makes of each position."""
        return x + self.residual_dropout(self.mlp(self.mlp_norm(x)))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        return {**super().get_config(), "num_shards": self.num_shards}


def regression(*batch_shape: int) -> Data:
    """Returns random numbers, and as many to fit."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, *batch_shape), dtype=np.float32)
    return x, y


def cross_entropy(y: Any, logits: Any) -> Any:
    """Returns the loss of each target, zero for those of class 0, the padding.

    Keras and pipelines average over all, padding included, so that the mean over
    microbatches is the batch's.
    """
    losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return losses * keras.ops.cast(y != 0, losses.dtype)


def mlp(*, num_layers: int = 16) -> Workload:
    """Returns the workload that is heavy in weights."""
    return Workload(
        make_layers=lambda: [
            keras.layers.Dense(1024, activation="relu") for _ in range(num_layers)
        ],
        batch_shape=(512, 1024),
        make_data=lambda: regression(512, 1024),
    )


def transformer(
    *, num_layers: int = 8, batch_size: int = 32, length: int = 128, d_model: int = 256
) -> Workload:
    """Returns the workload that is heavy in arithmetic and activations."""
    batch_shape = (batch_size, length, d_model)
    return Workload(
        make_layers=lambda: [EncoderBlock() for _ in range(num_layers)],
        batch_shape=batch_shape,
        make_data=lambda: regression(*batch_shape),
    )


def actions(*, num_layers: int = 2) -> Workload:
    """Returns a workload that is next to none."""
    return Workload(
        make_layers=lambda: [keras.layers.Dense(8) for _ in range(num_layers)],
        batch_shape=(64, 8),
        make_data=lambda: regression(64, 8),
    )


def decoder(
    *,
    batch_size: int = 32,
    length: int = 128,
    d_model: int = 256,
    vocabulary: int = 8192,
    dropout: float = 0.0,
) -> Workload:
    """Returns the workload whose last layer, the projection to tokens, is heavy."""

    def make_layers() -> Layers:
        return [
            TokenEmbedding(vocabulary=vocabulary, width=d_model, dropout=dropout),
            *(EncoderBlock(causal=True, dropout=dropout) for _ in range(8)),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(vocabulary),
        ]

    def make_data() -> Data:
        rng = np.random.default_rng(0)
        shape = (batch_size, length + 1)
        tokens = rng.integers(1, vocabulary, shape, dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:]

    return Workload(
        make_layers=make_layers,
        batch_shape=(batch_size, length),
        make_data=make_data,
        loss=cross_entropy,
        layers_per_stage={2: (6, 5), 4: (4, 3, 2, 2)},
    )


def resnet50(
    *,
    batch_size: int = 32,
    image_size: int = 64,
    filters: int = 64,
    num_classes: int = 1000,
) -> Workload:
    """Returns the workload of convolutions and batch normalization."""

    def make_layers() -> Layers:
        blocks = [
            Bottleneck(filters=filters * 2**group, strides=strides)
            for group, size in enumerate((3, 4, 6, 3))
            for strides in (1 if group == 0 else 2, *[1] * (size - 1))
        ]
        pool = keras.layers.GlobalAveragePooling2D()
        return [Stem(filters=filters), *blocks, pool, keras.layers.Dense(num_classes)]

    def make_data() -> Data:
        rng = np.random.default_rng(0)
        shape = (batch_size, image_size, image_size, 3)
        x = rng.standard_normal(shape, dtype=np.float32)
        return x, rng.integers(1, num_classes, batch_size, dtype=np.int32)

    return Workload(
        make_layers=make_layers,
        batch_shape=(batch_size, image_size, image_size, 3),
        make_data=make_data,
        loss=cross_entropy,
        layers_per_stage={2: (8, 11), 4: (4, 4, 5, 6)},
    )


def translation(
    *,
    batch_size: int = 32,
    length: int = 64,
    d_model: int = 256,
    vocabulary: int = 8192,
) -> Workload:
    """Returns the workload whose encoder's output goes to every later stage.

    The input has the source's tokens, `[:, 0]`, and the target's, `[:, 1]`.
    """

    def make_layers() -> Layers:
        return [
            TokenEmbedding(vocabulary=vocabulary, width=d_model, column=0),
            *(EncoderBlock() for _ in range(4)),
            keras.layers.LayerNormalization(),
            TokenEmbedding(vocabulary=vocabulary, width=d_model, column=1),
            *(DecoderBlock(causal=True) for _ in range(4)),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(vocabulary),
        ]

    def make_data() -> Data:
        rng = np.random.default_rng(0)
        shape = (batch_size, 2, length + 1)
        tokens = rng.integers(1, vocabulary, shape, dtype=np.int32)
        lengths = rng.integers(length // 2, length + 2, (batch_size, 2, 1))
        tokens *= np.arange(length + 1) < lengths
        return tokens[:, :, :-1], tokens[:, 1, 1:]

    return Workload(
        make_layers=make_layers,
        batch_shape=(batch_size, 2, length),
        make_data=make_data,
        loss=cross_entropy,
        connect=encode_decode,
        layers_per_stage={2: (8, 5), 4: (4, 4, 3, 2)},
    )


def encode_decode(layers: Layers, inputs: Any) -> Any:
    """Returns the logits of a translation's layers."""
    embed, *encoder, encoder_norm, embed_target = layers[:7]
    *decoder, norm, projection = layers[7:]
    memory = embed(inputs)
    for block in encoder:
        memory = block(memory, inputs)
    memory = encoder_norm(memory)
    x = embed_target(inputs)
    for block in decoder:
        x = block(x, memory, inputs)
    return projection(norm(x))


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "mlp": mlp,
    "transformer": transformer,
    "actions": actions,
    "decoder": decoder,
    "resnet50": resnet50,
    "translation": translation,
}


def quantized(layers: list[keras.layers.Layer]) -> list[keras.layers.Layer]:
    """Returns layers that train as they will run in 8 bits."""
    from tfgpipe import quantization

    scheme = quantization.default_8bit().with_rule(EncoderBlock, quantize_config())
    return quantization.apply(layers, scheme=scheme)


def quantize_config() -> QuantizeConfig:
    """Returns how an `EncoderBlock` is quantized."""
    from tfgpipe import quantization

    return quantization.QuantizeConfig(
        weights=["kernel"], activations=["hidden.activation"], output=True
    )


def set_weights(layers: list[keras.layers.Layer]) -> None:
    """Gives built layers their initial weights, the same whoever built them.

    Matrices are drawn with variance 2 / inputs, so that sixteen layers of relu neither
    lose nor inflate what goes through them; vectors get Keras' zeros and ones. Residual
    paths of ResNet50 begin at zero (Goyal et al. 2017, section 5.1): with ones,
    rounding grows tenfold and more in a step, and losses of two orders of summation
    soon have nothing in common.
    """
    rng = np.random.default_rng(0)
    for weight in (w for layer in layers for w in layer.trainable_weights):
        scale = float("gamma" in weight.name)
        if weight.path.endswith("norm3/gamma"):
            scale = 0.0
        value = np.full(weight.shape, scale, np.float32)
        if len(weight.shape) > 1 and "bias" not in weight.name:
            value = rng.standard_normal(weight.shape, dtype=np.float32)
            value *= np.sqrt(2 / np.prod(weight.shape[:-1]))
        weight.assign(value)
