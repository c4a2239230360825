"""Einsums over batches are products of matrices, and give the same."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import compare, joints
from tfgpipe.graph.passes.batched_einsum import batched_matmuls
from tfgpipe.stage.joint import trace_joint

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 6, "f": 2}


def traced(equation, left, right):
    return trace_joint(
        lambda inputs: {0: tf.raw_ops.Einsum(inputs=inputs, equation=equation)},
        input_specs=[tf.TensorSpec(left), tf.TensorSpec(right)],
        weights=[],
        state=[],
    )


def shape(letters):
    return tuple(SIZES[letter] for letter in letters)


@pytest.mark.parametrize(
    "equation",
    [
        "aecd,abcd->acbe",  # Scores of attention as Keras has them, and its outputs.
        "acbe,aecd->abcd",
        "abc,acd->abd",
        "abc,acd->adb",
        "bca,dac->abd",  # A batch that comes last, or second.
        "abcd,abce->abde",  # Batches of two axes, in either order.
        "abcd,bace->bade",
        "abcd,aced->abe",  # Two that are summed.
        "abcf,adef->abcde",  # Several rows, and columns.
        "abcf,adef->adbec",
        "ab,ab->a",  # Neither rows nor columns; no sum.
        "ab,ac->abc",
        "ab,a->ab",
    ],
)
def test_einsums_and_their_gradients(equation):
    left, right, result = map(shape, equation.replace("->", ",").split(","))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype("float32") for s in (left, right, result)]
    plain = traced(equation, left, right)
    other = batched_matmuls(plain)
    assert other.forms
    expected, received = joints.run(plain, *arrays), joints.run(other, *arrays)
    compare.assert_allclose(received, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        received[0], np.einsum(equation, *arrays[:2]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("ab,bc->ac", (2, 3), (3, 4)),  # Without a batch.
        ("aab,abc->ac", (2, 2, 3), (2, 3, 4)),  # A diagonal.
        ("...ab,...bc->...ac", (2, 3, 4), (2, 4, 3)),
        ("abc,adef->abdf", (2, 3, 4), (2, 5, 6, 2)),  # Sums of one operand alone.
        ("abc,acd->abd", (None, 3, 4), (None, 4, 5)),
    ],
)
def test_other_einsums_stay(equation, left, right):
    plain = traced(equation, left, right)
    assert batched_matmuls(plain) is plain


@pytest.mark.parametrize(
    "equation", ["abcd,abed->abce", "abcd,abce->abde", "abcd,abde->abce"]
)
def test_matrices_are_multiplied_as_they_lie(equation):
    left, right, _ = map(shape, equation.replace("->", ",").split(","))
    joint = batched_matmuls(traced(equation, left, right))
    seen = set()
    pending = [joint.graph.get_tensor_by_name(joint.forward.outputs[0]).op]
    while pending:
        op = pending.pop()
        seen.add(op.type)
        pending += [x.op for x in op.inputs]
    assert "BatchMatMulV2" in seen
    assert not seen & {"Einsum", "Transpose"}
