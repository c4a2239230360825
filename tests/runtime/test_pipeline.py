"""The order and number of the actions that really ran."""

from __future__ import annotations

import logging
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers.identity_models import STACKS
from tests.helpers.layer_stacks import REMAT_MODES
from tests.helpers.marks import nightly
from tests.helpers.recording_layer import LOG, Logs
from tfgpipe import schedules
from tfgpipe.runtime.executor import Executor


@pytest.mark.parametrize(
    ("remat", "graph"),
    [*((remat, True) for remat in REMAT_MODES), ("stage", False)],
)
def test_each_device_runs_the_schedules_actions_in_order_and_once(remat, graph):
    num_stages, num_microbatches = 3, 4
    layer = tfgpipe.PipelinedLayer(
        [Logs(k) for k in range(num_stages)],
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        remat=remat,
    )
    # Row m holds m, and is the whole of microbatch m.
    x = tf.range(num_microbatches, dtype=tf.float32)[:, None] * tf.ones((1, 2))
    layer(x)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, x)

    LOG.clear()
    y, gradient = (tf.function(step) if graph else step)(x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(gradient, tf.ones_like(x))
    for k, order in enumerate(schedules.gpipe(num_stages, num_microbatches).orders):
        ran = [(kind, m) for kind, stage, m in LOG if stage == k]
        if remat == "layer":
            # `tf.recompute_grad` runs the layer again within the backward.
            ran = [(kind, m) for kind, m in ran if kind == "backward"]
            order = [action for action in order if action.kind.name == "backward"]
        assert ran == [(action.kind.name, action.microbatch) for action in order]


def test_actions_of_a_device_are_chained_and_devices_are_not():
    layers = [keras.layers.Dense(4) for _ in range(4)]
    layer = tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=3)
    layer.build((None, 4))
    graph = tf.function(layer).get_concrete_function(tf.TensorSpec([6, 4])).graph
    calls = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
    assert len(calls) == 2 * 3
    for device in ("CPU:0", "CPU:1"):
        mine = [op for op in calls if op.device.endswith(device)]
        assert [list(op.control_inputs) for op in mine] == [
            [],
            [mine[0]],
            [mine[1]],
        ]


def test_microbatches_share_one_function_a_stage_and_equal_stages_too():
    layers = [keras.layers.Dense(4) for _ in range(4)]
    layer = tfgpipe.PipelinedLayer(layers, num_stages=4, num_microbatches=3)
    layer.build((None, 4))
    graph = tf.function(layer).get_concrete_function(tf.TensorSpec([6, 4])).graph
    calls = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
    assert len(calls) == 4 * 3
    assert len({op.get_attr("f").name for op in calls}) == 1


def test_the_graph_of_a_step_does_not_grow_with_the_number_of_layers():
    """Weightless layers, since each weight must be read and has an accumulator."""
    sizes = []
    for num_layers in (4, 12):
        layers = [keras.layers.Activation("tanh") for _ in range(num_layers)]
        layer = tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=4)
        layer.build((None, 4))

        @tf.function
        def step(x, layer=layer):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
            return tape.gradient(y, x)

        graph = step.get_concrete_function(tf.TensorSpec([8, 4])).graph
        sizes.append(len(graph.get_operations()))
    assert sizes[0] == sizes[1]


def test_two_encoders_wait_for_each_other_neither_forward_nor_backward():
    model = tfgpipe.pipeline(
        STACKS["two_encoders"].make(keras.layers.Dense),
        balance=[2, 2, 2],
        num_microbatches=3,
        schedule="1f1b",
    )
    assert model.schedule.data_flow == schedules.DataFlow(((), (), (0, 1)))
    assert str(schedules.draw(model.schedule)).splitlines()[:2] == [
        "stage 0  F0 F1 .. B0 F2 B1 .. B2",
        "stage 1  F0 F1 .. B0 F2 B1 .. B2",
    ]

    def step(x):
        with tf.GradientTape() as tape:
            y = model(x, training=True)
        return tape.gradient(y, model.trainable_variables)

    graph = tf.function(step).get_concrete_function(tf.TensorSpec([6, 5])).graph
    calls = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
    first, second, head = (
        [op for op in calls if op.device.endswith(f"CPU:{p}")] for p in range(3)
    )
    assert len(first) == len(second) == len(head) == 2 * 3
    for mine, others in ((first, second), (second, first)):
        # Forwards before those of the head, then backwards behind the head's.
        assert not needed_by(mine[:3]) & {*others, *head}
        assert not needed_by(mine[3:]) & {*others[3:]}
        assert needed_by(mine[3:]) >= {*head[3:]}


def needed_by(operations):
    """Returns all operations that some run after, themselves included."""
    found, left = set(), list(operations)
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left += [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
    return found


@pytest.mark.parametrize(
    "function", nightly(["test_step", "__call__"], gate=["train_step"])
)
def test_a_tf_function_of_ones_own_says_nothing_of_this_library(function, caplog):
    """AutoGraph warns of each function whose syntax it cannot convert."""
    layers = [
        keras.layers.Dense(4, "relu"),
        keras.layers.Dropout(0.5),
        tfgpipe.layers.TPMLP(8, units=4, num_shards=2),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1, activity_regularizer="l2"),
    ]
    model = tfgpipe.PipelinedModel(layers, num_stages=2, num_microbatches=2)
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = tf.ones((4, 4)), tf.ones((4, 1))
    model.build(x.shape)

    @tf.function
    def step(x, y):
        if function == "__call__":
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True))
            return tape.gradient(loss, model.trainable_variables)
        return getattr(model, function)((x, y))

    tensorflow_log = logging.getLogger("tensorflow")
    tensorflow_log.addHandler(caplog.handler)
    try:
        step.get_concrete_function(x, y)
    finally:
        tensorflow_log.removeHandler(caplog.handler)
    assert [
        r.getMessage() for r in caplog.records if "AutoGraph" in r.getMessage()
    ] == []


def test_autograph_converts_no_actions(monkeypatch):
    """Each call that it converts takes longer to trace."""
    model = tfgpipe.PipelinedModel(
        [keras.layers.Dense(1)], num_stages=1, num_microbatches=2
    )
    model.compile("sgd", "mse")
    x, y = tf.ones((4, 4)), tf.ones((4, 1))
    model.build(x.shape)
    callers = set()
    run_pass = Executor.run_pass

    def recorded(self, action):
        callers.update(frame.name for frame in traceback.extract_stack())
        run_pass(self, action)

    monkeypatch.setattr(Executor, "run_pass", recorded)
    tf.function(model.train_step).get_concrete_function((x, y))
    assert "tf__train_step" in callers
    assert "train" in callers
    assert "tf___run" not in callers
