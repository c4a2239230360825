"""Operations between functions, which XLA compiles for a TPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from tfgpipe.devices.names import assumed_device_type
from tfgpipe.devices.small_functions import run_on, scalars_scope


def _scale(tensors: list[tf.Tensor], factor: float, other: tf.Tensor) -> tf.Tensor:
    return tf.add_n([factor * x for x in tensors]) + other


def _both(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return x + 1.0, x - 1.0


@pytest.mark.parametrize("kind", [None, "TPU"])
@pytest.mark.parametrize("eagerly", [True, False])
def test_results_are_those_of_the_function(kind: str | None, eagerly: bool) -> None:
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        first = run_on("CPU:1", _scale, [x, x], 2.0, x)
        again = run_on("CPU:1", functools.partial(_scale, [x], 3.0), x)
        return [first, again, *run_on("CPU:1", _both, x)]

    x = np.arange(3, dtype="float32")
    with assumed_device_type(kind):
        results = (step if eagerly else tf.function(step))(tf.constant(x))
    for received, expected in zip(results, (5 * x, 4 * x, x + 1, x - 1), strict=True):
        np.testing.assert_array_equal(received, expected)


def test_on_a_tpu_alone_they_are_compiled_functions_and_equal_ones_are_one() -> None:
    def calls(kind: str | None) -> list[str]:
        with tf.Graph().as_default() as graph, assumed_device_type(kind):
            x = tf.zeros([3])
            for _ in range(2):
                x = run_on("CPU:1", _scale, [x], 2.0, x)
        return [
            op.get_attr("f").name
            for op in graph.get_operations()
            if op.type.endswith("PartitionedCall")
        ]

    assert not calls(None)
    first, second = calls("TPU")
    assert first == second


def test_single_numbers_are_on_the_host_of_a_tpu() -> None:
    with tf.Graph().as_default():
        with (
            assumed_device_type("TPU"),
            scalars_scope("/job:worker/task:1/device:TPU:1"),
        ):
            assert tf.zeros([]).device == "/job:worker/task:1/device:CPU:0"
        with scalars_scope("/device:GPU:1"):
            assert not tf.zeros([]).device
