"""Where things run: proved from the partitioned graphs of real `fit` steps."""

from __future__ import annotations

import collections
import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfgpipe

NUM_STAGES = 3
NUM_MICROBATCHES = 2


def partition_graphs(optimizer: str, *, strategy: bool) -> tuple[keras.Model, list]:
    """Fits one step and returns the graphs that each device ran."""
    if strategy:
        scope = tfgpipe.PipelineStrategy(num_stages=NUM_STAGES).scope()
    else:
        scope = contextlib.nullcontext()
    with scope:
        layers = [keras.layers.Dense(32, activation="relu") for _ in range(6)]
        pipelined = tfgpipe.PipelinedLayer(
            layers, num_microbatches=NUM_MICROBATCHES, num_stages=NUM_STAGES
        )
        model = keras.Sequential([keras.Input((32,)), pipelined])
        model.compile(optimizer, "mse", jit_compile=False)
    return model, fit_one_step(model)


def fit_one_step(model: keras.Model) -> list:
    """Fits one batch and returns the graph that each device ran."""
    x = np.ones((8, model.input_shape[-1]), "float32")
    context.enable_run_metadata()
    try:
        model.fit(x, x, batch_size=8, verbose=0)
        metadata = context.context().export_run_metadata()
    finally:
        context.disable_run_metadata()
    return [g for f in metadata.function_graphs for g in f.partition_graphs]


def device_of(name: str) -> int | None:
    match = re.search(r"CPU:(\d+)$", name)
    return int(match[1]) if match else None


@pytest.fixture(params=["adam", "adamw"])
def optimizer(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["no strategy", "strategy"])
def fitted(request, optimizer):
    return partition_graphs(optimizer, strategy=request.param)


def test_weights_slots_and_updates_are_on_their_stages_device(fitted):
    model, graphs = fitted
    (layer,) = model.layers
    stage_of = {}
    for stage in layer.stages:
        for weight in stage.weights:
            stage_of[weight.path.replace("/", "_")] = stage.index
            assert device_of(weight.value.device) == stage.index
    slots = 0
    for slot in model.optimizer.variables:
        for path, k in stage_of.items():
            if slot.name.startswith(path + "_"):
                assert device_of(slot.value.device) == k, slot.name
                slots += 1
    assert slots == 2 * len(stage_of)

    updates = collections.Counter()
    arithmetic = collections.Counter()
    for node in (node for graph in graphs for node in graph.node):
        if node.op in ("AssignAddVariableOp", "AssignSubVariableOp"):
            updates[device_of(node.device)] += 1
        if node.op == "Sqrt":
            arithmetic[device_of(node.device)] += 1
    # Per stage: 2 layers x (kernel, bias) x (Adam's m, v and the weight itself); and
    # one square root for each, the arithmetic between reading slots and writing them.
    for k in range(NUM_STAGES):
        assert updates[k] >= 2 * 2 * 3, updates
        assert arithmetic[k] >= 2 * 2, arithmetic


def test_programs_run_on_their_stages_device_and_are_shared(fitted):
    """Equal stages share one program, and so do all microbatches."""
    _, graphs = fitted
    calls = collections.Counter()
    functions = collections.defaultdict(set)
    for node in (node for graph in graphs for node in graph.node):
        if match := re.search(r"stage_(forward|backward)", _function(node)):
            calls[match[1], device_of(node.device)] += 1
            functions[match[1]].add(_function(node))
    assert len(calls) == 2 * NUM_STAGES
    assert set(calls.values()) == {NUM_MICROBATCHES}
    assert len(functions["forward"]) == 1
    # The first stage's goes without the gradient of its input, which nobody asks for.
    assert len(functions["backward"]) == 2


def test_only_boundaries_and_scalars_cross_between_devices(fitted):
    """No weight, gradient of a weight or slot is ever sent to another device."""
    _, graphs = fitted
    sent = []
    for graph in graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            ends = [node.attr[end].s for end in ("send_device", "recv_device")]
            if node.op == "_Send" and ends[0] != ends[1]:
                name, _, index = node.input[0].partition(":")
                sent.append((nodes[name], int(index or 0)))
    assert sent
    for source, index in sent:
        if _function(source):
            # The first result is the boundary; state and accumulators come after it.
            assert index == 0, source.name
        assert not re.search("kernel|bias|IdentityN", source.name), source.name
        if source.op == "ReadVariableOp":
            # Learning rate and step number are kept once and read by every stage.
            assert "adam" in source.name, source.name


def test_an_optimizer_of_a_custom_loop_can_be_placed():
    layers = [keras.layers.Dense(4) for _ in range(2)]
    layer = tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=2)
    optimizer = keras.optimizers.Adam()
    tfgpipe.place_optimizer(optimizer)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x, training=True) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply(gradients, layer.trainable_variables)

    layer.build((None, 4))
    step(tf.ones((4, 4)))
    slots = [v for v in optimizer.variables if re.search("momentum|velocity", v.name)]
    assert [device_of(slot.value.device) for slot in slots] == [
        device_of(weight.value.device)
        for weight in layer.trainable_variables
        for _ in range(2)
    ]


def test_each_replica_runs_on_its_own_devices():
    with tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2).scope():
        layers = [keras.layers.Dense(4) for _ in range(2)]
        layer = tfgpipe.PipelinedLayer(layers, num_microbatches=2)
        model = keras.Sequential([keras.Input((4,)), layer])
        model.compile("sgd", "mse", jit_compile=False)
    graphs = fit_one_step(model)
    devices = collections.defaultdict(set)
    for node in (node for graph in graphs for node in graph.node):
        if "stage_" in _function(node):
            devices["replica_1" in node.name].add(device_of(node.device))
    assert devices == {False: {0, 1}, True: {2, 3}}


def _function(node) -> str:
    return node.attr["f"].func.name if node.op.endswith("PartitionedCall") else ""
