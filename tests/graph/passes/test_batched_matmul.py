"""Products of batches of rows are one product, and give the same."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import joints
from tfgpipe.graph.passes.batched_matmul import flat_matmuls
from tfgpipe.graph.passes.gradient_factors import with_factors
from tfgpipe.stage.joint import trace_joint


def traced(x, w, **how):
    weight = keras.Variable(tf.zeros(w))
    return trace_joint(
        lambda inputs: {
            0: tf.raw_ops.BatchMatMulV2(x=inputs[0], y=weight.value, **how)
        },
        input_specs=[tf.TensorSpec(x)],
        weights=[weight],
        state=[],
    )


@pytest.mark.parametrize("adjoint", [False, True])
def test_batches_of_rows_are_multiplied_by_weights_at_once(adjoint):
    """The product, and the gradients of both of its factors."""
    rng = np.random.default_rng(0)
    shapes = (2, 3, 4), (5, 4) if adjoint else (4, 5), (2, 3, 5)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    plain = traced(*shapes[:2], adj_y=adjoint)
    flat = flat_matmuls(plain)
    assert len(flat.forms) == 3
    for a, b in zip(joints.run(plain, *arrays), joints.run(flat, *arrays), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)
    (gradient,) = with_factors(flat).backward.weight_grads
    shapes = [flat.spec(name).shape.as_list() for name in gradient.factors]
    assert shapes == [[6, n] for n in arrays[1].shape]
    types = [op.type for op in flat.graph.get_operations()]
    assert types.count("MatMul") == 3


@pytest.mark.parametrize(
    ("left", "right", "adj_x"),
    [
        ((2, 3, 4), (2, 4, 5), False),  # A product for each.
        ((2, 4, 3), (4, 5), True),
        ((3, 4), (4, 5), False),
        ((None, 3, 4), (4, 5), False),
    ],
)
def test_other_products_of_batches_stay(left, right, adj_x):
    plain = traced(left, right, adj_x=adj_x)
    assert flat_matmuls(plain) is plain
