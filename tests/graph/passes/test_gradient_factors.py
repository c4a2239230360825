"""Weight gradients that are products have factors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import joints
from tfgpipe.graph.passes.gradient_factors import weight_gradient_factors, with_factors
from tfgpipe.stage.joint import trace_joint


def traced(function, shape):
    w = keras.Variable(tf.zeros((3, 5)))
    return with_factors(
        trace_joint(
            lambda inputs: {0: function(inputs[0], w.value)},
            input_specs=[tf.TensorSpec(shape)],
            weights=[w],
            state=[],
        )
    )


def test_a_gradient_of_weights_has_factors():
    joint = traced(lambda x, w: tf.reshape(x, [-1, 3]) @ w, (2, 4, 3))
    (gradient,) = joint.backward.weight_grads
    rng = np.random.default_rng(0)
    x, w, dy = (
        rng.normal(size=s).astype("float32") for s in ((2, 4, 3), (3, 5), (8, 5))
    )
    shapes = [joint.spec(name).shape for name in gradient.factors]
    assert shapes == [(8, 3), (8, 5)]
    *_, received = joints.run(joint, x, w, dy)
    np.testing.assert_allclose(received, x.reshape(8, 3).T @ dy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: tf.matmul(x, 2.0 * w),
        lambda x, w: x @ w + tf.reduce_sum(w),
        lambda x, w: tf.gather(w, [0, 2]),
    ],
)
def test_other_gradients_have_none(function):
    (gradient,) = traced(function, (4, 3)).backward.weight_grads
    assert not gradient.factors


def test_factors_are_those_of_the_rows_of_all_batches():
    joint = traced(lambda x, w: tf.reshape(x, [-1, 3]) @ w, (2, 4, 3))
    assert not weight_gradient_factors(joint, joint.given.inputs[0])
