"""Where everything is: weights, products, what crosses between devices."""

from __future__ import annotations

import itertools

import pytest
import tensorflow as tf

from tests.helpers.marks import nightly
from tests.tensor_parallel import placed
from tests.tensor_parallel.models import CASES, WAYS
from tests.tensor_parallel.placed import device_number
from tfgpipe.tensor_parallel import TPDense, device_ops

# Each case once, with each way in turn.
IN_TURN = list(zip(CASES, itertools.cycle(WAYS), strict=False))


@pytest.mark.parametrize(
    ("case", "ways"), nightly(itertools.product(CASES, WAYS), gate=IN_TURN)
)
def test_work_is_split_evenly_and_what_crosses_is_copied(case, ways):
    graph = placed.traced(case, ways)
    placed.assert_work_is_split_evenly(case, graph)
    placed.assert_copies_are_operations(graph)


def test_parts_of_weights_are_on_the_devices_of_their_shards():
    layer = TPDense(8, num_shards=4, devices=["CPU:3", "CPU:5", "CPU:2", "CPU:7"])
    layer.build((None, 6))
    found = [device_number(part.value.device) for part in layer.kernel_parts]
    assert found == [3, 5, 2, 7]


def test_parts_of_outputs_stay_on_their_devices():
    layer = TPDense(8, num_shards=4, gather_output=False)
    outputs = layer(tf.ones((2, 6)))
    assert [device_number(y.device) for y in outputs] == [0, 1, 2, 3]


def test_a_fork_sums_gradients_where_it_is():
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            copies = device_ops.copy(x, "CPU:2", 3)
            y = [
                device_ops.on(f"CPU:{t}", tf.sin, copy) for t, copy in enumerate(copies)
            ]
        return tape.gradient(y, x)

    graph = step.get_concrete_function(tf.ones((2,))).graph
    sums = [op for op in graph.get_operations() if op.type == "AddN"]
    assert [device_number(op.device) for op in sums] == [2]


@pytest.mark.parametrize(
    ("case", "ways"),
    nightly(IN_TURN, gate=[("attention", "both_ways"), ("language_model", "ring")]),
)
def test_in_a_stage_placeholder_devices_are_named(case, ways):
    placed.assert_placeholder_devices_are_named(case, ways)
