"""Sums over replicas, one on each device."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import pairwise
from tests.helpers.compare import unknown_sizes
from tfgpipe.distribution import all_reduce

RNG = np.random.default_rng(0)


def devices(number):
    return [f"/job:localhost/replica:0/task:0/device:CPU:{d}" for d in range(number)]


def parts_of(number, shape):
    parts = []
    for device in devices(number):
        with tf.device(device):
            parts.append(tf.constant(RNG.normal(size=shape)))
    return parts


FACTORS = {
    "how": ("reduce", "ring"),
    "number": (1, 2, 3, 4),
    "shape": ((), (2,), (5, 3), (4, 2, 2)),
    "graph": (False, True),
}


@pytest.mark.parametrize(",".join(FACTORS), pairwise.all_pairs(FACTORS), ids=str)
def test_each_device_gets_the_same_sum(how, number, shape, graph):
    parts = parts_of(number, shape)

    def run(*given):
        return all_reduce.all_reduce(
            given, devices(number), algorithm=how, reducer=number - 1
        )

    sums = (tf.function(run) if graph else run)(*parts)
    for total, device in zip(sums, devices(number), strict=True):
        np.testing.assert_allclose(total, sum(p.numpy() for p in parts), 1e-14)
        np.testing.assert_array_equal(total, sums[0])
        assert total.shape == shape
        assert graph or total.device == device


def test_a_ring_adds_a_chunk_on_each_device():
    """2 (D - 1) chunks of 1 / D of the tensor leave each device, no more."""
    number, size = 4, 12

    @tf.function
    def run(*given):
        return all_reduce.all_reduce(given, devices(number), algorithm="ring")

    specs = [tf.TensorSpec((size,), tf.float64)] * number
    operations = run.get_concrete_function(*specs).graph.get_operations()
    adds = [op for op in operations if op.type == "AddV2"]
    assert sorted(op.device[-1] for op in adds) == sorted("0123" * (number - 1))
    moved = [
        op
        for op in operations
        if op.type == "Identity" and op.device not in ("", op.inputs[0].device)
    ]
    assert all(op.outputs[0].shape == (size // number,) for op in moved)
    left = [op.inputs[0].device[-1] for op in moved]
    assert sorted(left) == sorted("0123" * 2 * (number - 1))


@pytest.mark.parametrize("how", ["reduce", "ring"])
def test_rows_of_an_indexed_weight_are_put_together(how):
    def slices(rows, numbers):
        values = tf.constant(RNG.normal(size=(rows, 2)))
        return tf.IndexedSlices(values, tf.constant(numbers), tf.constant([5, 2]))

    parts = [slices(2, [1, 4]), slices(3, [0, 4, 4])]
    for total in all_reduce.all_reduce(parts, devices(2), algorithm=how):
        assert isinstance(total, tf.IndexedSlices)
        np.testing.assert_array_equal(total.indices, [1, 4, 0, 4, 4])
        expected = sum(tf.convert_to_tensor(part).numpy() for part in parts)
        np.testing.assert_allclose(tf.convert_to_tensor(total), expected, 1e-14)


def test_a_dense_gradient_among_indexed_ones():
    """As of an embedding whose transpose makes logits, on a replica without rows."""
    dense = tf.constant(RNG.normal(size=(5, 2)))
    rows = tf.IndexedSlices(tf.ones((1, 2), tf.float64), tf.constant([3]))
    total = all_reduce.reduce_to([rows, dense], devices(1)[0])
    summed = tf.math.unsorted_segment_sum(total.values, total.indices, 5)
    expected = dense.numpy() + np.eye(5)[3][:, None]
    np.testing.assert_allclose(summed, expected, 1e-14)


def test_sizes_that_are_not_known_are_reduced_on_one_device():
    @tf.function(input_signature=unknown_sizes([tf.ones((2, 3))] * 2, axes=2))
    def run(a, b):
        return all_reduce.all_reduce([a, b], devices(2), algorithm="ring")

    np.testing.assert_array_equal(run(tf.ones((2, 3)), tf.ones((2, 3)))[1], 2)
