"""What a training step would do on GPUs: what of each microbatch the host waits for."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import tfgpipe
from tfgpipe.accelerators.placement import HOST

layers = keras.layers


def transformer(dtype="int32"):
    """Embeddings with a mask, attention with dropout."""
    x = inputs = keras.Input((6,), dtype=dtype)
    x = layers.Embedding(20, 8, mask_zero=True)(x)
    for _ in range(2):
        h = layers.LayerNormalization()(x)
        h = layers.MultiHeadAttention(2, 4, dropout=0.1)(h, h, use_causal_mask=True)
        x = layers.Dropout(0.2)(layers.Add()([x, h]))
    return keras.Model(inputs, layers.Dense(20)(x))


def report(model, *, dtype="int32", **arguments):
    model = tfgpipe.pipeline(model, num_stages=2, num_microbatches=4, **arguments)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(clipnorm=1.0), loss)
    batch = tf.TensorSpec((8, 6), dtype), tf.TensorSpec((8, 6), dtype)
    return tfgpipe.dry_run(model, batch=batch, platform="h100-80g")


def waits(found, *, in_loop):
    return [x for x in found.transfers if x.waits and x.in_loop == in_loop]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_host_waits_for_nothing_of_a_microbatch(dtype):
    found = report(transformer(dtype), dtype=dtype)
    assert not waits(found, in_loop=True)
    # The seeds of the layers that draw, as they are before the step.
    assert sum(x.count for x in waits(found, in_loop=False)) == 4


def test_no_index_is_copied_to_add_up_gradients():
    found = report(transformer())
    assert {"(segment_ids)", "(indices)"} <= {x.reader for x in found.transfers}
    readers = {x.reader for x in found.transfers if x.in_loop and x.source == HOST}
    assert "(i)" not in readers
