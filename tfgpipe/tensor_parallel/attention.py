"""Attention whose heads are on T devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, argument_checks, unique
from tfgpipe.tensor_parallel import device_ops
from tfgpipe.tensor_parallel.dense import OutputProjection, QKVProjection
from tfgpipe.tensor_parallel.head_dropout import dropped_heads, next_seed
from tfgpipe.tensor_parallel.linear import DIRECTIONS, Collective
from tfgpipe.tensor_parallel.sharded_layer import (
    ShardedLayer,
    check_divides,
    check_sequences,
)


class Attention(ShardedLayer):
    """The base of attention within sequences that is in parts.

    Args:
        num_heads: Number of heads.
        key_dim: Size of each head's queries and keys.
        value_dim: Size of each head's values, or None for `key_dim`.
        dropout: Share of attention that is dropped in training.
        use_bias: True for biases in the projections.
        output_dim: Size of the output, or None for that of the query.
        kernel_initializer: Initializer of full kernels.
        bias_initializer: Initializer of full biases.
        seed: Seed of the dropout.
        **kwargs: Arguments of `ShardedLayer`.
    """

    # What each device has some of.
    parts: ClassVar[str]

    def __init__(
        self,
        num_heads: int,
        *,
        key_dim: int,
        value_dim: int | None,
        dropout: float,
        use_bias: bool,
        output_dim: int | None,
        kernel_initializer: Any,
        bias_initializer: Any,
        seed: int | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = argument_checks.check_count("num_heads", num_heads)
        self.key_dim = argument_checks.check_count("key_dim", key_dim)
        self.value_dim = argument_checks.check_count(
            "value_dim", key_dim if value_dim is None else value_dim
        )
        self.use_bias, self.output_dim = use_bias, output_dim
        self.dropout, self.seed = dropout, seed
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)

    def add_dropout(self) -> None:
        """Creates the dropout. Seeds are drawn in Keras' order."""
        self._dropout_layer = keras.layers.Dropout(
            self.dropout, seed=self.seed, dtype=self.dtype_policy
        )

    def next_seeds(self, training: bool | None) -> list[tf.Tensor]:
        """Returns the seed of a call that drops attention, as Keras passes it on."""
        if not (training and self.dropout):
            return []
        return [next_seed(self._dropout_layer)]

    def compute_output_shape(
        self, query_shape: Any, value_shape: Any, key_shape: Any = None
    ) -> Any:
        """Returns the shape of the output."""
        return (*query_shape[:-1], self.output_dim or query_shape[-1])


@keras.saving.register_keras_serializable(
    package="tfgpipe", name="TPMultiHeadAttention"
)
class MultiHeadAttention(Attention):
    """Multi-head attention with some of the heads on each of T devices.

    It computes what `keras.layers.MultiHeadAttention` does on sequences, and its files
    of weights are those of that layer. Each device projects queries, keys and values
    for its heads, attends, and multiplies with their rows of the output projection
    (Megatron-LM, Shoeybi et al. 2019).

    Args:
        num_heads: Number of heads, a multiple of T.
        key_dim: Size of each head's queries and keys.
        value_dim: Size of each head's values. Defaults to `key_dim`.
        dropout: Share of attention that is dropped in training, the same for any T.
        use_bias: True for biases in the projections.
        output_dim: Size of the output. Defaults to that of the query. (Keras'
            `output_shape`.)
        collective: `"gather"`, `"ring"` or `"bidirectional_ring"`, of `TPDense`, for
            the four projections.
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are, or those of the
            pipeline around the layer.
        kernel_initializer: Initializer of full kernels.
        bias_initializer: Initializer of full biases.
        seed: Seed of the dropout.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        Query `(batch, length, features)`, value and key `(batch, length, features)`.

    Output shape:
        `(batch, length, output_dim)`, of the query's length.

    Example:

    >>> attention = tfgpipe.layers.TPMultiHeadAttention(4, key_dim=2, num_shards=2)
    >>> x = np.ones((3, 5, 6), "float32")
    >>> tuple(attention(x, x, use_causal_mask=True).shape)
    (3, 5, 6)

    Raises:
        ValueError: If T does not divide the heads, there are too few devices, or an
            input is no sequence.
    """

    parts = "Heads"
    config_is_complete = True
    config_names = (
        *("num_heads", "key_dim", "value_dim", "dropout", "use_bias", "output_dim"),
        *("collective", "kernel_initializer", "bias_initializer", "seed"),
    )

    def __init__(
        self,
        num_heads: int,
        *,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_dim: int | None = None,
        collective: Collective = "gather",
        num_shards: int | None = None,
        devices: Sequence[str] | None = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dropout=dropout,
            use_bias=use_bias,
            output_dim=output_dim,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            seed=seed,
            num_shards=num_shards,
            devices=devices,
            **kwargs,
        )
        self.collective = argument_checks.check_choice(
            "collective", collective, [*DIRECTIONS]
        )
        check_divides("heads", num_heads, self.num_shards, self.name)
        self._softmax = keras.layers.Softmax(axis=-1, dtype=self.dtype_policy)

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        """Creates the projections."""
        check_sequences(self.parts, self.name, query_shape, value_shape)
        key_shape = value_shape if key_shape is None else key_shape

        def projection(name: str, size: int, shape: Any) -> QKVProjection:
            layer = QKVProjection(self.num_heads, size=size, **self._common(name))
            layer.build(shape)
            return layer

        # By these names `keras.layers.MultiHeadAttention` finds them in files.
        self.query_dense = projection("query", self.key_dim, query_shape)
        self.key_dense = projection("key", self.key_dim, key_shape)
        self.value_dense = projection("value", self.value_dim, value_shape)
        self.add_dropout()
        units = self.output_dim or query_shape[-1]
        self.output_dense = OutputProjection(units, **self._common("attention_output"))
        self.output_dense.build(self.value_dense.compute_output_shape(value_shape))

    def call(
        self,
        query: tf.Tensor,
        value: tf.Tensor,
        key: tf.Tensor | None = None,
        query_mask: tf.Tensor | None = None,
        value_mask: tf.Tensor | None = None,
        key_mask: tf.Tensor | None = None,
        attention_mask: tf.Tensor | None = None,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> tf.Tensor:
        """Attends.

        Args:
            query: Queries.
            value: Values.
            key: Keys. Defaults to `value`.
            query_mask: Unused, as by Keras' layer, which reads the Keras mask on
                `query`. Those on all three are taken off.
            value_mask: False for padding in `value`, `[batch, length]`. Defaults to the
                Keras mask on `value`.
            key_mask: False for padding in `key`, `[batch, length]`. Defaults to the
                Keras mask on `key`.
            attention_mask: True where a query attends to a value, `[batch, length of
                query, length of value]`; the batch may be of size 1.
            training: True to drop attention.
            use_causal_mask: True for positions that attend to none after them.
        """
        devices = self.shard_devices
        key = value if key is None else key
        query_mask = keras_internals.calls.get_mask(query)
        for tensor in (query, value, key):
            keras_internals.calls.set_mask(tensor, None)
        causal = causal_mask(query, value) if use_causal_mask else None
        masks = joint_mask(query_mask, value_mask, key_mask, attention_mask, causal)
        query, key, value = copied((query, key, value), devices[0])
        projected = (
            self.query_dense(query),
            self.key_dense(key),
            self.value_dense(value),
        )
        seeds = self.next_seeds(training)
        outputs = [
            device_ops.on(
                devices[t], self._heads_of(t, bool(masks)), *qkv, *masks, *seeds
            )
            for t, qkv in enumerate(zip(*projected, strict=True))
        ]
        output = self.output_dense(tuple(outputs))
        keras_internals.calls.set_mask(output, query_mask)
        return output

    @property
    def max_shards(self) -> int:
        """Size that T divides: the heads."""
        return int(self.num_heads)

    def _heads_of(self, shard: int, has_mask: bool) -> Callable[..., tf.Tensor]:
        """Returns the attention of a shard's heads.

        A function of queries, keys, values, the mask if there is one, and the seed if
        attention is dropped.
        """
        scale = self.key_dim**-0.5

        def attend(q: Any, k: Any, v: Any, *rest: tf.Tensor) -> tf.Tensor:
            mask = rest[0][:, None] if has_mask else None
            if not self.dropout:
                return keras.ops.dot_product_attention(q, k, v, mask=mask, scale=scale)
            # As Keras' layer does with dropout.
            scores = keras.ops.einsum(
                "aecd,abcd->acbe", k, q * keras.ops.cast(scale, q.dtype)
            )
            scores = self._softmax(scores, mask=mask)
            if len(rest) > has_mask:
                scores = dropped_heads(
                    scores,
                    rate=self.dropout,
                    seed=rest[-1],
                    num_heads=self.num_heads,
                    first=shard * self.num_heads // self.num_shards,
                )
            return keras.ops.einsum("acbe,aecd->abcd", scores, v)

        return attend

    def _common(self, name: str) -> dict[str, Any]:
        """Returns the arguments that the projections share."""
        return {
            "collective": self.collective,
            "num_shards": self.num_shards,
            "devices": self.devices,
            "use_bias": self.use_bias,
            "kernel_initializer": self.kernel_initializer.clone(),
            "bias_initializer": self.bias_initializer.clone(),
            "dtype": self.dtype_policy,
            "name": name,
        }


def causal_mask(query: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns a mask of positions that attend to none after them, `[1, ..., ...]`."""
    shape = (keras.ops.shape(query)[1], keras.ops.shape(value)[1])
    return tf.linalg.band_part(tf.ones(shape, tf.bool), -1, 0)[None]


def joint_mask(
    query_mask: Any, value_mask: Any, key_mask: Any, attention_mask: Any, causal: Any
) -> list[tf.Tensor]:
    """Returns one mask `[batch, length of query, length of value]`, or none."""
    terms = [
        None if query_mask is None else query_mask[:, :, None],
        *(m if m is None else m[:, None, :] for m in (value_mask, key_mask)),
        attention_mask,
        causal,
    ]
    masks = [keras.ops.cast(term, "bool") for term in terms if term is not None]
    return [functools.reduce(tf.logical_and, masks)] if masks else []


def copied(tensors: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
    """Returns tensors of which some may be the same, each a copy to be read once."""
    copies = IdentityMap(
        (x, device_ops.copy(x, device, sum(x is y for y in tensors)))
        for x in unique(tensors)
    )
    return [copies[x].pop() for x in tensors]
