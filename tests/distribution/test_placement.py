"""Where things run: proved from the partitioned graphs of real `fit` steps."""

from __future__ import annotations

import collections
import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers.placement import device_of, graphs_of

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
    return graphs_of(lambda: model.fit(x, x, batch_size=8, verbose=0))


def transfers(graphs: list) -> collections.Counter:
    """Counts what each device sends to each other: results of stages, microbatches."""
    sent: collections.Counter = collections.Counter()
    for graph in graphs:
        kinds = {node.name: node.op for node in graph.node}
        for node in graph.node:
            if node.op != "_Send":
                continue
            ends = [node.attr[end].s.decode() for end in ("send_device", "recv_device")]
            if kinds[node.input[0].partition(":")[0]] in ("PartitionedCall", "Split"):
                sent[tuple(map(device_of, ends))] += ends[0] != ends[1]
    return sent


@pytest.fixture(
    scope="module",
    params=[("adam", False), ("adamw", True)],
    ids=["no strategy", "strategy"],
)
def fitted(request):
    optimizer, strategy = request.param
    return partition_graphs(optimizer, strategy=strategy)


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


def test_a_skip_goes_straight_from_its_maker_to_its_readers():
    x = inputs = keras.Input((4,))
    x = skip = keras.layers.Dense(4)(x)
    for _ in range(2):
        x = keras.layers.Dense(4)(x)
    outputs = keras.layers.Add()([keras.layers.Dense(4)(x), skip, skip])
    layer = tfgpipe.PipelinedLayer(
        keras.Model(inputs, outputs), partition=[1, 1, 1, 2], num_microbatches=3
    )
    assert [stage.segment.input_ids for stage in layer.stages] == [
        (0,),
        (1,),
        (2,),
        (3, 1),
    ]
    x = tf.ones((6, 4))
    sent = transfers(graphs_of(lambda: tf.function(layer)(x)))
    # For each microbatch one each, though the last stage reads the skip twice.
    assert +sent == {(0, 1): 3, (1, 2): 3, (2, 3): 3, (0, 3): 3}


def test_a_side_input_goes_once_to_each_device_that_asks_for_it():
    class Scales(keras.layers.Layer):
        def call(self, x, scale=None, lengths=None):
            return x * scale

    dense = [keras.layers.Dense(4) for _ in range(2)]
    scales = [Scales() for _ in range(3)]
    layer = tfgpipe.PipelinedLayer(
        [dense[0], scales[0], scales[1], dense[1], scales[2]],
        partition=[1, 2, 1, 1],
        num_microbatches=3,
    )
    x, scale = tf.ones((6, 4)), tf.ones((6, 1))
    layer(x, scale=scale)
    asked = [len(stage.segment.input_ids) for stage in layer.stages]
    assert asked == [1, 2, 1, 2]
    run = tf.function(layer)
    sent = transfers(graphs_of(lambda: run(x, scale=scale)))
    # It is cut on the first device that asks, and the pieces go on to the other.
    assert +sent == {(0, 1): 3, (1, 2): 3, (2, 3): 3, (1, 3): 3}


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
