"""Attention over a sequence that is in parts on T devices (context parallelism).

Each device projects its positions, and has their queries. With `"ring"` keys and values
go from device to device, and each adds them to a running softmax (Liu et al. 2023,
"Ring Attention"; Milakov and Gimelshein 2018):

             step 0          step 1          step 2
    device 0 q0 on k0 v0     q0 on k2 v2     q0 on k1 v1
    device 1 q1 on k1 v1     q1 on k0 v0     q1 on k2 v2
    device 2 q2 on k2 v2     q2 on k1 v1     q2 on k0 v0

A causal sequence is in 2 T chunks, of which device t has t and 2 T - 1 - t, so that all
have as many pairs of queries and keys (Zhu 2024, "zig-zag"); pairs that nothing attends
to are left out. With `"all_to_all"` devices exchange positions for heads, attend to
whole sequences with some of the heads each, and exchange back (Jacobs et al. 2023,
"DeepSpeed Ulysses").

No device has scores of more than its queries: of `[heads, L, L]`, L / T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import argument_checks
from tfgpipe.tensor_parallel import device_ops
from tfgpipe.tensor_parallel.attention import (
    Attention,
    causal_mask,
    copied,
    joint_mask,
)
from tfgpipe.tensor_parallel.chunks import Chunks
from tfgpipe.tensor_parallel.cross_entropy import precise
from tfgpipe.tensor_parallel.head_dropout import dropped_heads, kept_rows
from tfgpipe.tensor_parallel.sharded_layer import check_divides, check_sequences

Exchange = Literal["ring", "all_to_all"]


@keras.saving.register_keras_serializable(package="tfgpipe")
class TPSequenceAttention(Attention):
    """Multi-head or grouped-query attention with T devices for parts of the sequence.

    It computes what `keras.layers.MultiHeadAttention`, or with `num_key_value_heads`
    `keras.layers.GroupQueryAttention`, does on sequences, and its files of weights are
    theirs. Every device projects and attends with whole weights, which are on the first
    one and sent to the others.

    Args:
        num_heads: Number of heads of queries.
        key_dim: Size of each head's queries and keys.
        num_key_value_heads: Number of heads of keys and values, which divides
            `num_heads`. Defaults to `num_heads`.
        value_dim: Size of each head's values. Defaults to `key_dim`.
        dropout: Share of attention that is dropped in training, the same for any T. A
            device draws numbers for its part of the scores alone.
        use_bias: True for biases in the projections.
        output_dim: Size of the output. Defaults to that of the query.
        exchange: `"ring"`, or `"all_to_all"` for whole sequences with some of the heads
            on each device.
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are, or those of the
            pipeline around the layer.
        kernel_initializer: Initializer of kernels.
        bias_initializer: Initializer of biases.
        seed: Seed of the dropout.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        Query `(batch, length, features)`, value and key `(batch, length, features)`.
        Lengths need not be multiples of T.

    Output shape:
        `(batch, length, output_dim)`, of the query's length.

    Example:

    >>> attention = tfgpipe.layers.TPSequenceAttention(
    ...     4, key_dim=2, num_key_value_heads=2, num_shards=2
    ... )
    >>> x = np.ones((3, 5, 6), "float32")
    >>> tuple(attention(x, x, use_causal_mask=True).shape)
    (3, 5, 6)

    Raises:
        ValueError: If heads do not divide each other, or with `"all_to_all"` T does not
            divide them; if there are too few devices, or an input is no sequence.
    """

    parts = "Positions"
    config_is_complete = True
    config_names = (
        *("num_heads", "key_dim", "num_key_value_heads", "value_dim", "dropout"),
        *("use_bias", "output_dim", "exchange", "kernel_initializer"),
        *("bias_initializer", "seed"),
    )

    def __init__(
        self,
        num_heads: int,
        *,
        key_dim: int,
        num_key_value_heads: int | None = None,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_dim: int | None = None,
        exchange: Exchange = "ring",
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
        self.num_key_value_heads = argument_checks.check_count(
            "num_key_value_heads",
            num_heads if num_key_value_heads is None else num_key_value_heads,
        )
        if num_heads % self.num_key_value_heads:
            raise ValueError(
                "As many heads of queries share each head of keys and values. Received "
                f"num_heads={num_heads}, num_key_value_heads={num_key_value_heads} in "
                f"layer '{self.name}'. Make one a multiple of the other."
            )
        choices = list(get_args(Exchange))
        self.exchange = argument_checks.check_choice("exchange", exchange, choices)
        if self._by_heads:
            check_divides("heads", self.num_key_value_heads, self.num_shards, self.name)

    @property
    def _by_heads(self) -> bool:
        return self.exchange == get_args(Exchange)[1]

    @property
    def max_shards(self) -> int:
        """1: heads are whole."""
        return 1

    @property
    def key_value_size(self) -> int:
        """Numbers of a position that go from device to device."""
        return int(self.num_key_value_heads * (self.key_dim + self.value_dim))

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        """Creates the projections."""
        check_sequences(self.parts, self.name, query_shape, value_shape)

        def projection(name: str, heads: int, size: int, shape: Any) -> Any:
            layer = self._dense(name, "abc,cde->abde", (None, heads, size), "de")
            layer.build(shape)
            return layer

        few = self.num_key_value_heads
        key_shape = value_shape if key_shape is None else key_shape
        # By these names Keras' layers find them in files.
        self.query_dense = projection(
            "query", self.num_heads, self.key_dim, query_shape
        )
        self.key_dense = projection("key", few, self.key_dim, key_shape)
        self.value_dense = projection("value", few, self.value_dim, value_shape)
        self.add_dropout()
        units = self.output_dim or query_shape[-1]
        self.output_dense = self._dense(
            "attention_output", "abcd,cde->abe", (None, units), "e"
        )
        self.output_dense.build((None, None, self.num_heads, self.value_dim))

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
            query_mask: Unused, as by Keras' layers, which read the Keras mask on
                `query`. Those on all three are taken off.
            value_mask: False for padding in `value`, `[batch, length]`. Defaults to the
                Keras mask on `value`.
            key_mask: False for padding in `key`, `[batch, length]`. Defaults to the
                Keras mask on `key`.
            attention_mask: True where a query attends to a value, `[batch, length of
                query, length of value]`; the batch may be of size 1.
            training: True to drop attention.
            use_causal_mask: True for positions that attend to none after them. With
                another mask no pairs are left out.
        """
        query_mask = keras_internals.calls.get_mask(query)
        key = value if key is None else key
        for tensor in (query, value, key):
            keras_internals.calls.set_mask(tensor, None)
        given = joint_mask(query_mask, value_mask, key_mask, attention_mask, None)
        skips = use_causal_mask and query is key and not (given or self._by_heads)
        if use_causal_mask and not skips:
            causal = causal_mask(query, value)
            given = joint_mask(None, None, None, causal, *(given or [None]))
        chunks = Chunks(self.shard_devices, is_causal=skips)
        q, k, v = (
            self._projected(dense, chunks.split(x), chunks)
            for dense, x in zip(
                (self.query_dense, self.key_dense, self.value_dense),
                copied((query, key, value), self.shard_devices[0]),
                strict=True,
            )
        )
        attend = self._attend_by_heads if self._by_heads else self._attend_in_a_ring
        seeds = self.next_seeds(training)
        attended = attend(q, k, v, chunks, given, seeds)
        outputs = self._projected(self.output_dense, attended, chunks)
        output = device_ops.gather(outputs, self.shard_devices[0], axis=1)
        keras_internals.calls.set_mask(output, query_mask)
        return output

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Passes on the mask of the query."""
        if isinstance(previous_mask, (list, tuple)):
            return previous_mask[0]
        return previous_mask

    def _dense(self, name: str, equation: str, shape: Any, axes: str) -> Any:
        return keras.layers.EinsumDense(
            equation,
            output_shape=shape,
            bias_axes=axes if self.use_bias else None,
            kernel_initializer=self.kernel_initializer.clone(),
            bias_initializer=self.bias_initializer.clone(),
            dtype=self.dtype_policy,
            name=name,
        )

    def _projected(
        self, dense: Any, parts: Sequence[tf.Tensor], chunks: Chunks
    ) -> list[tf.Tensor]:
        """Returns the projection of each chunk, on its device."""
        kernels = self.copies_of(
            dense.trainable_variables or dense.variables, len(parts)
        )
        return [
            device_ops.on(chunks.device(c), _project(dense), part, *kernels[c])
            for c, part in enumerate(parts)
        ]

    def _scores(self) -> Callable[..., tf.Tensor]:
        scale, groups = self.key_dim**-0.5, self.num_heads // self.num_key_value_heads

        def scores(q: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
            q = tf.cast(q, precise(q.dtype))
            q *= tf.cast(scale, q.dtype)  # In single precision first, as Keras has it.
            k = tf.repeat(tf.cast(k, q.dtype), groups, axis=2)
            return keras.ops.einsum("bthd,bshd->bhts", q, k)

        return scores

    def _values(self, p: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        """Returns sums of values, `[batch, heads, length, size]`."""
        groups = self.num_heads // self.num_key_value_heads
        v = tf.repeat(tf.cast(v, p.dtype), groups, axis=2)
        return keras.ops.einsum("bhts,bshd->bhtd", p, v)

    def _attend_in_a_ring(
        self,
        q: Sequence[tf.Tensor],
        k: Sequence[tf.Tensor],
        v: Sequence[tf.Tensor],
        chunks: Chunks,
        mask: Sequence[tf.Tensor],
        seeds: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns for each chunk of queries the values that it attends to."""
        T = self.num_shards
        queries = [
            device_ops.copy(x, chunks.device(c), chunks.num_read(c))
            for c, x in enumerate(q)
        ]
        states: list[list[tf.Tensor]] = [[] for _ in q]
        blocks = [chunks.blocks(x) for x in mask]
        kept = [self._kept(seed, q, k, chunks) for seed in seeds]
        moving = {c: (k[c], v[c]) for c in range(len(k))}
        for step in range(T):
            for t, device in enumerate(self.shard_devices):
                for c in chunks.of((t - step) % T):
                    readers = [r for r in chunks.of(t) if chunks.reads(r, c)]
                    goes_on = step < T - 1
                    if not readers and not goes_on:
                        continue
                    keys, values = (
                        device_ops.copy(x, device, len(readers) + goes_on)
                        for x in moving[c]
                    )
                    for r in readers:
                        add = self._add_to(
                            has_state=bool(states[r]),
                            has_mask=bool(blocks),
                            is_diagonal=chunks.is_diagonal(r, c),
                            drops=bool(kept),
                        )
                        states[r] = device_ops.on(
                            device,
                            add,
                            *(queries[r].pop(), keys.pop(), values.pop()),
                            *states[r],
                            *(block[r][c] for block in (*blocks, *kept)),
                        )
                    if goes_on:
                        neighbour = self.shard_devices[(t + 1) % T]
                        moving[c] = tuple(
                            device_ops.on(neighbour, tf.identity, x.pop())
                            for x in (keys, values)
                        )
        dtype = self.compute_dtype
        return [
            device_ops.on(chunks.device(c), _finish(dtype), *state)
            for c, state in enumerate(states)
        ]

    def _add_to(
        self,
        *,
        has_state: bool,
        has_mask: bool,
        is_diagonal: bool = False,
        drops: bool = False,
    ) -> Callable[..., Any]:
        """Returns the function that adds keys and values to a running softmax.

        Its state is the largest score so far, the sum of exponentials, and the sum of
        values that these weigh.
        """
        scores = self._scores()

        def add(q: Any, k: Any, v: Any, *rest: tf.Tensor) -> list[tf.Tensor]:
            s = scores(q, k)
            mask = rest[3 * has_state][:, None] if has_mask else None
            if is_diagonal:
                mask = tf.linalg.band_part(tf.ones(tf.shape(s)[2:], tf.bool), -1, 0)
            if mask is not None:
                s = _masked(s, mask)
            most = tf.stop_gradient(tf.reduce_max(s, axis=-1, keepdims=True))
            if has_state:
                before, total, summed = rest[:3]
                before = tf.stop_gradient(before)
                most = tf.maximum(most, before)
            p = tf.exp(s - most)
            new_total = tf.reduce_sum(p, axis=-1, keepdims=True)
            if drops:
                p = tf.where(rest[-1], p / (1 - self.dropout), tf.zeros((), p.dtype))
            new_summed = self._values(p, v)
            if has_state:
                scale = tf.exp(before - most)
                new_total += total * scale
                new_summed += summed * scale
            return [most, new_total, new_summed]

        return add

    def _attend_by_heads(
        self,
        q: Sequence[tf.Tensor],
        k: Sequence[tf.Tensor],
        v: Sequence[tf.Tensor],
        chunks: Chunks,
        mask: Sequence[tf.Tensor],
        seeds: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the same, by all positions and some of the heads on each device."""
        devices = self.shard_devices
        T = self.num_shards
        by_heads = [
            [
                device_ops.split(x, device, [x.shape[2] // T] * T, 2)
                for x, device in zip(some, devices, strict=True)
            ]
            for some in (q, k, v)
        ]
        lengths = [tf.shape(x)[1] for x in q]
        back: list[list[tf.Tensor]] = [[] for _ in devices]
        for t, device in enumerate(devices):
            mine = [
                device_ops.gather([parts[t] for parts in some], device, axis=1)
                for some in by_heads
            ]
            attend = self._attend_whole(t, has_mask=bool(mask))
            y = device_ops.on(device, attend, *mine, *mask, *seeds)
            with tf.device(device):
                sizes = tf.stack(lengths)
            parts = device_ops.on(
                device, lambda x, n: tf.split(x, n, 1, num=len(devices)), y, sizes
            )
            for u, part in enumerate(parts):
                back[u].append(part)
        return [
            device_ops.gather(some, device, axis=2)
            for some, device in zip(back, devices, strict=True)
        ]

    def _attend_whole(self, shard: int, *, has_mask: bool) -> Callable[..., tf.Tensor]:
        """Returns the attention of a shard's heads, with a seed behind if it drops."""
        scores, heads = self._scores(), self.num_heads // self.num_shards

        def attend(q: Any, k: Any, v: Any, *rest: tf.Tensor) -> tf.Tensor:
            s = scores(q, k)
            if has_mask:
                s = _masked(s, rest[0][:, None])
            p = tf.nn.softmax(s)
            if len(rest) > has_mask:
                p = dropped_heads(
                    tf.cast(p, self.compute_dtype),
                    rate=self.dropout,
                    seed=rest[-1],
                    num_heads=self.num_heads,
                    first=shard * heads,
                )
                p = tf.cast(p, s.dtype)
            y = tf.transpose(self._values(p, v), [0, 2, 1, 3])
            return tf.cast(y, self.compute_dtype)

        return attend

    def _kept(
        self,
        seed: tf.Tensor,
        q: Sequence[tf.Tensor],
        k: Sequence[tf.Tensor],
        chunks: Chunks,
    ) -> list[list[tf.Tensor]]:
        """Returns the scores that are kept, of each chunk of queries and of keys."""
        columns = [keras.ops.shape(x)[1] for x in k]
        rows = [keras.ops.shape(x)[1] for x in q]
        blocks, first = [], 0
        for c, x in enumerate(q):
            with tf.device(chunks.device(c)):
                shape = (keras.ops.shape(x)[0], self.num_heads, rows[c], sum(columns))
                kept = kept_rows(
                    shape,
                    tf.identity(seed),
                    rate=self.dropout,
                    first=first,
                    num_rows=sum(rows),
                    dtype=self.compute_dtype,
                )
                blocks.append(tf.split(kept, tf.stack(columns), 3, num=len(columns)))
            first += rows[c]
        return blocks


def _masked(scores: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns scores, low where the mask is False: finite, so that differences are."""
    return tf.where(mask, scores, -0.7 * scores.dtype.max)


def _project(dense: Any) -> Callable[..., tf.Tensor]:
    """Returns the projection of a layer, a function of its input and weights."""

    def project(x: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        y = keras.ops.einsum(dense.equation, tf.cast(x, kernel.dtype), kernel)
        return y + bias[0] if bias else y

    return project


def _finish(dtype: str) -> Callable[..., tf.Tensor]:
    """Returns the function of a running softmax that returns its sums of values."""

    def finish(most: Any, total: tf.Tensor, summed: tf.Tensor) -> tf.Tensor:
        del most
        return tf.cast(tf.transpose(summed / total, [0, 2, 1, 3]), dtype)

    return finish
