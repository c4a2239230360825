"""The stacks of layers that are measured, in Keras' own layers.

* `mlp`: 16 x Dense(1024 -> 1024) with relu, batch 512. Heavy in weights: each
  microbatch adds 67 MB of gradients.
* `transformer`: 8 pre-LN encoder blocks (d_model 256, 4 heads, MLP of 1024 with gelu,
  no dropout) on `[32, 128, 256]`. About 168 GFLOP a step.

Both train in float32 on mean squared error to a random target of the input's shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

import tfgpipe

if TYPE_CHECKING:
    from tfgpipe.quantization import QuantizeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A stack of equal layers, with the batch it is fed.

    Attributes:
        make_layer: Returns one more layer of the stack.
        num_layers: How many there are.
        batch_shape: Shape of the input and the target, the batch included.
    """

    make_layer: Callable[[], keras.layers.Layer]
    num_layers: int
    batch_shape: tuple[int, ...]

    def make_layers(self) -> list[keras.layers.Layer]:
        """Returns the layers of the stack, not yet built."""
        return [self.make_layer() for _ in range(self.num_layers)]

    def make_data(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the input and the target of every step."""
        rng = np.random.default_rng(0)
        x, y = rng.standard_normal((2, *self.batch_shape), dtype=np.float32)
        return x, y


class EncoderBlock(keras.layers.Layer):
    """A pre-LN transformer encoder block without dropout.

    Args:
        num_heads: Number of attention heads; the width of the input is divided by it.
        mlp_ratio: Width of the hidden layer of the MLP, in widths of the input.
        **kwargs: Arguments of the base layer.

    Input shape:
        `[batch, length, width]`.

    Output shape:
        The input's.
    """

    config_is_complete = True

    def __init__(
        self, *, num_heads: int = 4, mlp_ratio: int = 4, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.mlp_ratio = mlp_ratio

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Makes the sublayers for the width of the input."""
        *batch, width = input_shape
        self.attention_norm = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(
            self.num_heads, width // self.num_heads
        )
        self.mlp_norm = keras.layers.LayerNormalization()
        self.hidden = keras.layers.Dense(self.mlp_ratio * width, activation="gelu")
        self.output_projection = keras.layers.Dense(width)
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.mlp_norm.build(input_shape)
        self.hidden.build(input_shape)
        self.output_projection.build((*batch, self.mlp_ratio * width))

    def call(self, x: Any) -> Any:
        """Attends, then transforms each position, each on a residual path."""
        y = self.attention_norm(x)
        x += self.attention(y, y)
        return x + self.output_projection(self.hidden(self.mlp_norm(x)))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        config = {"num_heads": self.num_heads, "mlp_ratio": self.mlp_ratio}
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
        self.attention_norm = keras.layers.LayerNormalization()
        self.attention = tfgpipe.layers.TPMultiHeadAttention(
            self.num_heads, key_dim=width // self.num_heads, num_shards=self.num_shards
        )
        self.mlp_norm = keras.layers.LayerNormalization()
        self.mlp = tfgpipe.layers.TPMLP(
            self.mlp_ratio * width, units=width, num_shards=self.num_shards
        )
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.mlp_norm.build(input_shape)
        self.mlp.build(input_shape)

    def call(self, x: Any) -> Any:
        """Attends, then transforms each position, each on a residual path."""
        y = self.attention_norm(x)
        x += self.attention(y, y)
        return x + self.mlp(self.mlp_norm(x))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        return {**super().get_config(), "num_shards": self.num_shards}


def mlp(*, num_layers: int = 16) -> Workload:
    """Returns the workload that is heavy in weights."""
    return Workload(
        make_layer=lambda: keras.layers.Dense(1024, activation="relu"),
        num_layers=num_layers,
        batch_shape=(512, 1024),
    )


def transformer(
    *, num_layers: int = 8, batch_size: int = 32, length: int = 128, d_model: int = 256
) -> Workload:
    """Returns the workload that is heavy in arithmetic and activations."""
    return Workload(
        make_layer=EncoderBlock,
        num_layers=num_layers,
        batch_shape=(batch_size, length, d_model),
    )


def actions(*, num_layers: int = 2) -> Workload:
    """Returns a workload that is next to none."""
    return Workload(
        make_layer=lambda: keras.layers.Dense(8),
        num_layers=num_layers,
        batch_shape=(64, 8),
    )


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "mlp": mlp,
    "transformer": transformer,
    "actions": actions,
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
    lose nor inflate what goes through them; vectors get Keras' zeros and ones.
    """
    rng = np.random.default_rng(0)
    for weight in (w for layer in layers for w in layer.trainable_weights):
        scale = "gamma" in weight.name
        value = np.full(weight.shape, float(scale), np.float32)
        if len(weight.shape) > 1 and "bias" not in weight.name:
            value = rng.standard_normal(weight.shape, dtype=np.float32)
            value *= np.sqrt(2 / np.prod(weight.shape[:-1]))
        weight.assign(value)
