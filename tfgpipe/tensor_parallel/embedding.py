"""An embedding whose vocabulary is on T devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._util import argument_checks
from tfgpipe.tensor_parallel import device_ops
from tfgpipe.tensor_parallel.cross_entropy import cross_entropy, precise
from tfgpipe.tensor_parallel.sharded_layer import ShardedLayer


@keras.saving.register_keras_serializable(package="tfgpipe", name="TPEmbedding")
class Embedding(ShardedLayer):
    """An embedding with its table in T parts, each on a device of its own.

    It computes what `keras.layers.Embedding` does, and its files of weights are those
    of that layer. Each device looks up the tokens that it has, and gives zeros for
    others; the first one adds them up.

    Weights are tied by calling it again. With `reverse=True` it gives logits, as
    `keras.layers.ReversibleEmbedding` does. With `targets` it gives each position's
    cross-entropy, and logits are never in one place: see `TPCrossEntropy`, which does
    the same for a head of its own.

    >>> tokens = keras.Input((None,), dtype="int32")
    >>> targets = keras.Input((None,), dtype="int32")
    >>> embedding = tfgpipe.layers.TPEmbedding(10, 4, num_shards=2)
    >>> model = keras.Model([tokens, targets], embedding(embedding(tokens), targets))
    >>> model.compile("adam", tfgpipe.tensor_parallel.OutputLoss())
    >>> x, y = np.array([[1, 2, 3]]), np.array([[2, 3, 4]])
    >>> _ = model.fit([x, y], y, verbose=0)

    The parts of the table are equal: the last is padded with rows that are never read.

    Args:
        input_dim: Size of the vocabulary, any number.
        output_dim: Size of an embedding.
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are, or those of the
            pipeline around the layer.
        embeddings_initializer: Initializer of the full table.
        mask_zero: True for token 0 as padding, which gives a Keras mask.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        `(batch, ...)` of integers. Tokens outside the vocabulary give zeros. With
        `reverse=True` or `targets`, `(batch, ..., output_dim)`.

    Output shape:
        `(batch, ..., output_dim)`; `(batch, ..., input_dim)` with `reverse=True`; and
        `(batch, ...)` with `targets`.

    Raises:
        ValueError: If there are too few devices.
    """

    config_is_complete = True
    config_names = ("input_dim", "output_dim", "embeddings_initializer", "mask_zero")

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        num_shards: int | None = None,
        devices: Sequence[str] | None = None,
        embeddings_initializer: Any = "uniform",
        mask_zero: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_shards=num_shards, devices=devices, **kwargs)
        self.input_dim = argument_checks.check_count("input_dim", input_dim, most=2**31)
        self.output_dim = argument_checks.check_count("output_dim", output_dim)
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.mask_zero = mask_zero
        self.supports_masking = mask_zero

    def build(self, input_shape: Any = None) -> None:
        """Creates the table."""
        self.table = self.add_parts(
            "embeddings",
            (self.input_dim, self.output_dim),
            axis=0,
            initializer=self.embeddings_initializer,
        )

    def call(
        self, inputs: Any, targets: tf.Tensor | None = None, reverse: bool = False
    ) -> tf.Tensor:
        """Returns embeddings of tokens, or logits or losses of embeddings.

        Args:
            inputs: Tokens, or embeddings.
            targets: Tokens to predict from embeddings, `(batch, ...)`.
            reverse: True for the logits of embeddings.
        """
        if targets is not None:
            return cross_entropy(targets, self.logits(inputs), self.shard_devices)
        if reverse:
            return device_ops.gather(self.logits(inputs), self.shard_devices[0])
        tokens = keras.ops.cast(inputs, "int32")
        embeddings = [
            device_ops.on(
                device,
                functools.partial(
                    self.look_up, start=start, size=size, dtype=self.compute_dtype
                ),
                *(table, tokens),
            )
            for device, start, size, table in self._tables()
        ]
        return device_ops.reduce(embeddings, self.shard_devices[0])

    def logits(self, hidden: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Returns logits of embeddings in T parts, each on its device.

        For layers that have this one inside. As in `keras.layers.ReversibleEmbedding`
        they are of the wider type of embeddings and table.

        Args:
            hidden: Embeddings, `(batch, ..., output_dim)`.
        """
        copies = device_ops.copy(hidden, self.shard_devices[0], self.num_shards)

        def multiply(size: int) -> Any:
            return lambda x, table: keras.ops.matmul(x, tf.transpose(table[:size]))

        return tuple(
            device_ops.on(device, multiply(size), x, table)
            for x, (device, _, size, table) in zip(copies, self._tables(), strict=True)
        )

    def compute_output_spec(
        self, inputs: Any, targets: Any = None, reverse: bool = False
    ) -> keras.KerasTensor:
        """Infers the shape and dtype of embeddings, logits or losses."""
        if targets is not None:
            return keras.KerasTensor(targets.shape, precise(self.compute_dtype))
        if not reverse:
            return keras.KerasTensor(
                (*inputs.shape, self.output_dim), self.compute_dtype
            )
        dtype = keras.backend.result_type(inputs.dtype, self.variable_dtype)
        return keras.KerasTensor((*inputs.shape[:-1], self.input_dim), dtype)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Returns the mask of tokens that are no padding."""
        if not self.mask_zero or not keras.backend.is_int_dtype(inputs.dtype):
            return None
        return keras.ops.not_equal(inputs, 0)

    @staticmethod
    def look_up(
        table: tf.Tensor, tokens: tf.Tensor, *, start: int, size: int, dtype: str
    ) -> tf.Tensor:
        """Returns the embeddings of tokens, zeros for those that are not in the table.

        Args:
            table: Embeddings of tokens from `start` on, `(size, output_dim)` or longer.
            tokens: Tokens, 32-bit integers.
            start: The first token of the table.
            size: Number of tokens in the table.
            dtype: Dtype of the result.
        """
        inside = (tokens >= start) & (tokens < start + size)
        rows = tf.gather(table, tf.where(inside, tokens - start, 0))
        rows = tf.cast(rows, dtype)
        return tf.where(inside[..., None], rows, tf.zeros((), rows.dtype))

    def _tables(self) -> Iterator[tuple[str, int, int, tf.Tensor]]:
        """Yields the device, first token, number of tokens and table of each shard."""
        rows = -(-self.input_dim // self.num_shards)
        starts = range(0, rows * self.num_shards, rows)
        sizes = [min(rows, max(0, self.input_dim - start)) for start in starts]
        tables = self.values(self.table, self.variable_dtype)
        return zip(self.shard_devices, starts, sizes, tables, strict=True)
