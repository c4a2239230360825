"""Moments of parts, merged, are the moments of the whole."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpipe.stage.batch_moments import BatchMoments

MOMENTUM = 0.9


def moved_averages(x, mask, sizes, axis=-1):
    """Returns moving averages that moved by `x`, taken in parts, from 2 and 3."""
    masks = [None] * len(sizes) if mask is None else tf.split(mask, sizes)
    total, moments = [tf.zeros((), x.dtype)] * 3, None
    for rows, their_mask in zip(tf.split(x, sizes), masks, strict=True):
        moments = BatchMoments(
            rows, their_mask, axis=axis, variables=(), momentum=MOMENTUM
        )
        total = moments.merge(total)
    num_channels = x.shape[axis]
    before = [tf.fill([num_channels], tf.constant(v, x.dtype)) for v in (2.0, 3.0)]
    return [average.numpy() for average in moments.update(total, before)]


def averages_of_keras(x, mask, axis=-1):
    """Returns the same by Keras' layer, that takes all at once."""
    norm = keras.layers.BatchNormalization(
        axis=axis,
        momentum=MOMENTUM,
        moving_mean_initializer=keras.initializers.Constant(2.0),
        moving_variance_initializer=keras.initializers.Constant(3.0),
        dtype=keras.backend.standardize_dtype(x.dtype),
    )
    norm(x, training=True, mask=mask)
    return [norm.moving_mean.numpy(), norm.moving_variance.numpy()]


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    offset=st.sampled_from([0.0, 1.0, 1e4]),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_parts_of_any_size_give_the_moments_of_the_whole(sizes, offset, masked, seed):
    rng = np.random.default_rng(seed)
    x = tf.constant(offset + rng.standard_normal((sum(sizes), 3, 2)))
    mask = tf.constant(rng.random((sum(sizes), 3)) < 0.5) if masked else None
    mean, variance = moved_averages(x, mask, sizes)
    expected_mean, expected_variance = averages_of_keras(x, mask)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-12)
    # What a variance loses is relative to the squares it is the difference of.
    np.testing.assert_allclose(
        variance, expected_variance, rtol=1e-12, atol=1e-15 * (1 + offset**2)
    )


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_any_axis_can_be_the_one_that_is_kept(axis):
    x = tf.random.normal((6, 3, 4, 5), 2.0, 3.0, tf.float64)
    received = moved_averages(x, None, [2, 3, 1], axis)
    np.testing.assert_allclose(received, averages_of_keras(x, None, axis), rtol=1e-12)


def test_a_part_that_is_masked_altogether_changes_nothing():
    x = tf.random.normal((6, 4, 2), 5.0, 1.0, tf.float64)
    mask = tf.constant([[True] * 4] * 2 + [[False] * 4] * 2 + [[True, False] * 2] * 2)
    received = moved_averages(x, mask, [2, 2, 2])
    np.testing.assert_allclose(received, averages_of_keras(x, mask), rtol=1e-12)


def test_averages_stay_where_there_are_no_rows():
    mean, variance = moved_averages(tf.zeros((0, 3, 2), tf.float64), None, [0, 0])
    np.testing.assert_array_equal(mean, [2.0, 2.0])
    np.testing.assert_array_equal(variance, [3.0, 3.0])


def test_single_precision_keeps_small_variances_beside_large_means():
    x = tf.constant(1e3 + np.random.default_rng(0).standard_normal((64, 2)), tf.float32)
    _, variance = moved_averages(x, None, [8] * 8)
    exact = MOMENTUM * 3 + (1 - MOMENTUM) * np.var(np.float64(x), axis=0)
    np.testing.assert_allclose(variance, exact, rtol=1e-5)
