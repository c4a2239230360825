"""Observers: ranges of numbers, and what is rounded to them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpipe import quantization
from tfgpipe.quantization.ranges import Bounds

X = np.array([[-1.0, 4.0], [0.5, 2.0]], "float32")


def bounds(low, high):
    return Bounds(tf.constant(low, tf.float32), tf.constant(high, tf.float32))


def ends(range_: Bounds) -> list:
    return [np.asarray(end).tolist() for end in range_]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [-1.0, 4.0]),
        ({"axis": -1}, [[-1.0, 0.0], [0.5, 4.0]]),
        ({"axis": 0}, [[-1.0, 0.0], [4.0, 2.0]]),
        ({"symmetric": True, "narrow_range": True}, [-4.0, 4.0]),
        ({"symmetric": True}, [-4.0 * 256 / 254, 4.0]),
    ],
)
def test_what_is_seen_holds_zero(arguments, expected):
    observer = quantization.LastValueRange(**arguments)
    np.testing.assert_allclose(ends(observer.observe(tf.constant(X))), expected, 1e-6)


def test_averages_move_a_step_and_ramped_ones_begin_with_what_they_see():
    seen = bounds(-2.0, 2.0)
    plain = quantization.MovingAverageRange(decay=0.75)
    assert ends(plain.update(bounds(-6.0, 6.0), seen, 0)) == [-5.0, 5.0]
    ramped = quantization.MovingAverageRange(decay=0.75, ramp=True)
    assert ends(ramped.update(bounds(-6.0, 6.0), seen, 0)) == [-2.0, 2.0]
    assert ends(ramped.update(bounds(-6.0, 6.0), seen, 9)) == [-4.0, 4.0]
    assert ends(ramped.update(bounds(-6.0, 6.0), seen, 1000)) == [-5.0, 5.0]


def test_other_ranges_are_the_last_the_widest_or_stay():
    before, seen = bounds(-1.0, 6.0), bounds(-2.0, 2.0)
    assert ends(quantization.LastValueRange().update(before, seen, 3)) == [-2.0, 2.0]
    assert ends(quantization.AllValuesRange().update(before, seen, 3)) == [-2.0, 6.0]
    # The first replaces an initial range that nobody has seen.
    assert ends(quantization.AllValuesRange().update(before, seen, 0)) == [-2.0, 2.0]
    fixed = quantization.FixedRange(initial=(0.0, 1.0))
    assert fixed.is_fixed
    assert ends(fixed.update(before, seen, 3)) == [-1.0, 6.0]


@settings(max_examples=50, deadline=None)
@given(
    bits=st.integers(2, 8),
    narrow_range=st.booleans(),
    low=st.floats(-10, -0.1),
    high=st.floats(0.1, 10),
)
def test_a_quantized_tensor_has_few_levels_and_zero_is_one(
    bits, narrow_range, low, high
):
    observer = quantization.LastValueRange(bits=bits, narrow_range=narrow_range)
    x = np.linspace(low - 1, high + 1, 20_001, dtype=np.float32)
    y = observer.fake_quantize(tf.constant(x), bounds(low, high)).numpy()
    levels = np.unique(y)
    assert len(levels) <= 2**bits - narrow_range
    step = (high - low) / (2**bits - 1 - narrow_range)
    np.testing.assert_allclose(np.diff(levels), step, rtol=1e-3)
    assert observer.fake_quantize(tf.zeros([1]), bounds(low, high)).numpy() == 0
    inside = (x > levels[0]) & (x < levels[-1])
    assert np.abs(x - y)[inside].max() <= step / 2 * 1.001


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 2, 3, 4, 5)])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_each_position_of_an_axis_is_quantized_with_a_range_of_its_own(axis, shape):
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    observer = quantization.LastValueRange(axis=axis)
    whole = quantization.LastValueRange()
    seen = observer.observe(tf.constant(x))
    with tf.GradientTape() as tape:
        value = tf.constant(x)
        tape.watch(value)
        y = observer.fake_quantize(value, seen)
    assert tape.gradient(y, value).shape == x.shape
    for i in range(x.shape[axis]):
        part = tf.constant(np.take(x, i, axis))
        alone = whole.fake_quantize(part, Bounds(*(end[i] for end in seen)))
        np.testing.assert_array_equal(np.take(y, i, axis), alone)


def test_the_gradient_goes_straight_through_but_not_past_the_ends():
    x = tf.constant([-3.0, -0.3, 0.2, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = quantization.LastValueRange().fake_quantize(x, bounds(-1.0, 1.0))
    assert tape.gradient(y, x).numpy().tolist() == [0.0, 1.0, 1.0, 0.0]


def test_half_precision_stays_half():
    x = tf.constant(X, tf.bfloat16)
    assert quantization.LastValueRange().fake_quantize(x, bounds(-1.0, 4.0)).dtype == (
        tf.bfloat16
    )


def test_observers_are_made_again_from_their_configuration():
    kinds = (
        quantization.MovingAverageRange(decay=0.9, ramp=True),
        quantization.LastValueRange(bits=4, axis=-1),
        quantization.AllValuesRange(symmetric=True),
        quantization.FixedRange(initial=(0, 1), narrow_range=True),
    )
    for observer in kinds:
        assert type(observer).from_config(observer.get_config()) == observer
    assert all(a != b for a, b in itertools.combinations(kinds, 2))


@pytest.mark.parametrize("bits", [1, 17])
def test_bits_out_of_bounds_are_refused(bits):
    with pytest.raises(ValueError, match=rf"2 to 16 bits. Received bits={bits}"):
        quantization.LastValueRange(bits=bits)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 3.0])
def test_a_decay_out_of_bounds_is_refused(decay):
    with pytest.raises(ValueError, match=rf"Received decay={decay}"):
        quantization.MovingAverageRange(decay=decay)


@pytest.mark.parametrize("initial", [(0.0, 0.0), (1.0, 2.0), (-2.0, -1.0), (0.0,)])
def test_a_range_without_zero_or_width_is_refused(initial):
    with pytest.raises(ValueError, match=r"holds zero and is wider.*Use \(-6, 6\)"):
        quantization.FixedRange(initial=initial)
