"""Dropout of attention, of some heads or of some positions of queries alone.

Keras draws one number for each score of each head, `[batch, heads, length of query,
length of value]`, from a counter-based generator (Philox; Salmon et al. 2011): number i
of a draw depends on the key and on i alone. So a shard draws the numbers of its heads,
which for each example follow one another, and no others:

    example 0            example 1            example 2
    [h0 h1 | h2 h3]      [h0 h1 | h2 h3]      [h0 h1 | h2 h3]      T = 2
             shard 1              shard 1              shard 1

Of a part of the queries a shard draws rows of each head. The same scores are dropped
for any T, and by Keras' layer with the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

_PHILOX = tf.random.Algorithm.PHILOX.value
# Numbers that one step of its counter gives.
_NUMBERS_A_STEP = {"float64": 2}
_DEFAULT_NUMBERS_A_STEP = 4


def next_seed(dropout: keras.layers.Dropout) -> tf.Tensor:
    """Returns the seed of a call that drops, as Keras passes it on."""
    seed = dropout.seed_generator.next()
    return tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)


def kept_rows(
    shape: Sequence[Any],
    seed: tf.Tensor,
    *,
    rate: float,
    first: Any,
    num_rows: Any,
    dtype: str,
) -> tf.Tensor:
    """Returns the scores of some rows that are kept, `[batch, heads, rows, length]`.

    Args:
        shape: Shape of the scores here: rows of queries by all values.
        seed: Seed of the draw, two integers.
        rate: Share of scores that is dropped.
        first: Index of the first row here.
        num_rows: Number of all rows.
        dtype: The dtype of scores, of which the draw is.
    """
    batch, heads, rows, length = shape
    generator = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)

    def draw(head: tf.Tensor) -> tf.Tensor:
        row = head * tf.cast(num_rows, tf.int64) + tf.cast(first, tf.int64)
        start = row * tf.cast(length, tf.int64)
        numbers = _draw(generator, start, rows * length, dtype)
        return tf.reshape(numbers >= rate, [rows, length])

    every = tf.range(tf.cast(batch * heads, tf.int64))
    kept = tf.map_fn(draw, every, fn_output_signature=tf.bool)
    return tf.reshape(kept, [batch, heads, rows, length])


def dropped_heads(
    scores: tf.Tensor, *, rate: float, seed: tf.Tensor, num_heads: Any, first: Any
) -> tf.Tensor:
    """Returns the scores of some heads, some set to zero and others scaled up.

    Or features of some positions: the second axis is that which is in parts.

    Args:
        scores: Scores, `[batch, heads here, length of query, length of value]`.
        rate: Share of scores that is dropped.
        seed: Seed of the draw, two integers.
        num_heads: Number of all heads, an integer or a tensor of 64 bits.
        first: Index of the first head here, an integer or such a tensor.
    """
    if isinstance(num_heads, int) and scores.shape[1] == num_heads:
        return tf.nn.experimental.stateless_dropout(scores, rate, seed=seed)
    numbers = _numbers(
        keras.ops.shape(scores), seed, num_heads, first, scores.dtype.name
    )
    kept = scores * tf.constant(1 / (1 - rate), scores.dtype)
    return tf.where(numbers >= rate, kept, tf.zeros((), scores.dtype))


def _numbers(
    shape: Sequence[Any], seed: tf.Tensor, num_heads: Any, first: Any, dtype: str
) -> tf.Tensor:
    """Returns those of the numbers of a draw for all heads that are for the heads here.

    `shape` is that of the scores here.
    """
    batch, heads, *lengths = shape
    # XLA needs sizes as constants, which they are where lengths are known.
    head = math.prod(lengths)
    generator = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)

    def draw(example: tf.Tensor) -> tf.Tensor:
        start = (example * num_heads + first) * tf.cast(head, tf.int64)
        numbers = _draw(generator, start, heads * head, dtype)
        return tf.reshape(numbers, [heads, *lengths])

    examples = tf.range(tf.cast(batch, tf.int64))
    return tf.map_fn(draw, examples, fn_output_signature=dtype)


def _draw(
    generator: Sequence[tf.Tensor], start: tf.Tensor, num: Any, dtype: str
) -> tf.Tensor:
    """Returns so many numbers of a draw, from one of them on, inside of a loop.

    `generator` is the draw's key and counter.
    """
    size = _NUMBERS_A_STEP.get(dtype, _DEFAULT_NUMBERS_A_STEP)
    key, counter = generator
    # The loop is on its device; in a stage that is a placeholder, which a name inside
    # the loop's function would remain.
    with tf.device(None):
        low = counter[0] + tf.cast(start // size, tf.uint64)
        numbers = tf.raw_ops.StatelessRandomUniformV2(
            shape=[num + size - 1],
            key=key,
            counter=tf.stack([low, counter[1]]),
            alg=_PHILOX,
            dtype=dtype,
        )
        return tf.slice(numbers, [tf.cast(start % size, tf.int32)], [num])
