"""What the updates of all weights read is read once on each device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe


def weights():
    made = []
    for i in range(6):
        with tf.device(f"CPU:{i % 2}"):
            made.append(keras.Variable(np.full((3,), i, "float32")))
    return made


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.1),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    ),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "accumulation": lambda: keras.optimizers.Adam(
        0.1, gradient_accumulation_steps=2, clipnorm=1.0
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), initial_scale=2.0
    ),
}


def trained(name, *, placed):
    """Returns all values after two calls of a function of two steps."""
    variables, optimizer = weights(), OPTIMIZERS[name]()
    optimizer.build(variables)
    if placed:
        tfgpipe.place_optimizer(optimizer)

    @tf.function(autograph=False)
    def two_steps(gradients):
        for _ in range(2):
            optimizer.apply(gradients, variables)

    for _ in range(2):
        two_steps([tf.constant([1.0, -2.0, 0.5]) * (i + 1) for i in range(6)])
    return [v.numpy() for v in (*variables, *optimizer.variables)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_steps_in_one_function_are_two_steps(name):
    expected, received = (trained(name, placed=placed) for placed in (False, True))
    for a, b in zip(expected, received, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_step_is_sent_to_a_device_once():
    variables, optimizer = weights(), keras.optimizers.Adam(0.1)
    optimizer.build(variables)
    tfgpipe.place_optimizer(optimizer)
    function = tf.function(lambda gradients: optimizer.apply(gradients, variables))
    graph = function.get_concrete_function([tf.ones([3])] * 6).graph
    scalar_reads = [
        op
        for op in graph.get_operations()
        if op.type == "ReadVariableOp" and op.outputs[0].shape == ()
    ]
    # The step and the learning rate, on each of two devices; the step to count it.
    assert len(scalar_reads) == 2 * 2 + 1


def test_gradients_without_variables_are_of_those_that_it_was_built_for():
    """0 - 0.5 * (1 + 3) on both replicas."""
    with tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2).scope() as strategy:
        variable = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(0.5)
        tfgpipe.place_optimizer(optimizer)
        optimizer.build([variable])

    @tf.function
    def step():
        def each():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            optimizer.apply([tf.constant([1.0, 3.0])[replica]])

        strategy.run(each)

    step()
    copies = strategy.experimental_local_results(variable.value)
    assert [float(copy) for copy in copies] == [-2.0, -2.0]
