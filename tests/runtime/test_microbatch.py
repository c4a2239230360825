"""Cutting and joining mini-batches of every size."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpipe.runtime import microbatch


@given(st.integers(0, 40), st.integers(1, 12))
def test_known_sizes_differ_by_at_most_one_and_none_is_empty(rows, num_microbatches):
    split = microbatch.split_batch(tf.zeros([rows, 2]), num_microbatches)
    assert sum(split.sizes) == rows
    assert len(split.sizes) == max(1, min(rows, num_microbatches))
    assert max(split.sizes) - min(split.sizes) <= 1
    assert min(split.sizes) >= min(rows, 1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 40), st.integers(1, 12))
def test_sizes_unknown_until_run_time_are_the_same_then_empty(rows, num_microbatches):
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def sizes(x):
        return microbatch.split_batch(x, num_microbatches).sizes

    received = [int(size) for size in sizes(tf.zeros([rows, 2]))]
    known = microbatch.split_batch(tf.zeros([rows, 2]), num_microbatches).sizes
    assert received == [*known, *[0] * (num_microbatches - len(known))]


@pytest.mark.parametrize("rows", [1, 4, 7, 12])
def test_joined_microbatches_are_the_mini_batch(rows):
    x = tf.random.normal([rows, 3])
    split = microbatch.split_batch(x, 4)
    np.testing.assert_array_equal(microbatch.join(split.split(x)), x)
    weights = [
        split.batch_fraction(m, tf.float32).numpy() for m in range(len(split.sizes))
    ]
    np.testing.assert_allclose(sum(weights), 1.0, rtol=1e-6)


def test_the_weight_of_a_microbatch_of_nothing_is_zero():
    split = microbatch.split_batch(tf.zeros([0, 2]), 4)
    assert split.batch_fraction(0, tf.float32).numpy() == 0.0
