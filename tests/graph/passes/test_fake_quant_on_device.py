"""Fake quantization with ranges on the device: the bits of TensorFlow's own kernel."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import joints
from tfgpipe.graph.passes.fake_quant_on_device import fake_quant_on_device
from tfgpipe.stage.joint import trace_joint

RANGES = [
    (0.0, 0.0),
    (-1.0, 1.0),
    (-0.3, 2.7),
    (0.0, 6.0),
    (-5.0, 0.0),
    (-1e-6, 3e-6),
    (-123.4, 77.7),
    (0.5, 3.0),
    (-3.0, -0.5),
]


def forms(function, *arrays):
    """Returns a function's results: as they are, in the other form, that compiled."""
    plain = trace_joint(
        lambda inputs: dict(enumerate(function(*inputs))),
        input_specs=[tf.TensorSpec(a.shape) for a in arrays],
        weights=[],
        state=[],
        non_differentiable=range(len(arrays)),
    )
    arrays = (*arrays, *([np.float32(0)] * len(plain.backward.given)))
    other = fake_quant_on_device(plain)
    return [
        joints.run(plain, *arrays),
        joints.run(other, *arrays),
        joints.run(other, *arrays, compiled=True),
    ]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_a_range_for_all(bits, narrow):
    rng = np.random.default_rng(bits)
    for low, high in [*RANGES, *np.sort(rng.normal(size=(5, 2)) * 3)]:
        x = rng.normal(size=4096) * (high - low + 0.1) + (low + high) / 2
        x[:7] = low, high, 0.0, -0.0, np.inf, -np.inf, low - 1
        arrays = [np.float32(a) for a in (x, rng.normal(size=4096), low, high)]

        def function(x, dy, low, high):
            how = {"num_bits": bits, "narrow_range": narrow}
            y = tf.quantization.fake_quant_with_min_max_vars(x, low, high, **how)
            dx = tf.quantization.fake_quant_with_min_max_vars_gradient(
                dy, x, low, high, **how
            )
            return y, dx[0]

        expected, received, compiled = forms(function, *arrays)
        for a, b, c in zip(expected, received, compiled, strict=True):
            np.testing.assert_array_equal(
                a.numpy().view(np.int32), b.numpy().view(np.int32)
            )
            np.testing.assert_array_equal(a, c)  # XLA's zeros have other signs.


@pytest.mark.parametrize("narrow", [False, True])
def test_a_range_for_each_channel(narrow):
    rng = np.random.default_rng(0)
    low, high = np.float32(RANGES).T
    shape = (5, 7, len(RANGES))
    arrays = [*(np.float32(4 * rng.normal(size=shape)) for _ in range(2)), low, high]

    def function(x, dy, low, high):
        name = "fake_quant_with_min_max_vars_per_channel"
        y = getattr(tf.quantization, name)(x, low, high, narrow_range=narrow)
        dx = getattr(tf.quantization, f"{name}_gradient")(
            dy, x, low, high, narrow_range=narrow
        )
        return y, dx[0]

    expected, *others = forms(function, *arrays)
    for received in others:
        for a, b in zip(expected, received, strict=True):
            np.testing.assert_array_equal(a, b)
