"""Devices of the operations of a sharded model: products and copies."""

from __future__ import annotations

import re

import tensorflow as tf

from tests.tensor_parallel.models import CASES, WAYS, gradients
from tfgpipe.devices import sharding
from tfgpipe.stage import joint

# Products of both passes of a layer that is not sharded.
WHOLE = {"mlp": 3}
HEAVY = ("MatMul", "BatchMatMulV2", "Einsum", "Softmax", "GatherV2")


def device_number(device: str) -> int | None:
    found = re.search(r"(?:CPU|SHARD):(\d+)$", device)
    return int(found[1]) if found else None


def traced(case: str, ways: str) -> tf.Graph:
    """Returns the graph of both passes of a case in four shards."""
    sharded = CASES[case].make(4, **WAYS[ways])
    return gradients(sharded, CASES[case].data(3)).graph


def assert_work_is_split_evenly(case: str, graph: tf.Graph) -> None:
    """Asserts that each device does a quarter of each kind of heavy operation."""
    work = {}
    for op in graph.get_operations():
        if op.type in HEAVY:
            number = device_number(op.device)
            work.setdefault(op.type, []).append(number)
    products = work["MatMul"]
    assert products.count(None) == WHOLE.get(case, 0)
    work["MatMul"] = [number for number in products if number is not None]
    for kind, numbers in work.items():
        if kind == "Softmax" and case == "columns_and_rows":
            assert set(numbers) == {0}  # Over all units.
            continue
        assert set(numbers) == {0, 1, 2, 3}, kind
        assert max(map(numbers.count, range(4))) == len(numbers) / 4, kind


def assert_copies_are_operations(graph: tf.Graph) -> None:
    """Asserts that what crosses is copied by an operation of its own."""
    for op in graph.get_operations():
        if not op.device or op.type in ("Identity", "ReadVariableOp"):
            continue
        sources = {
            device_number(x.device)
            for x in op.inputs
            if x.device and x.op.type not in ("Const", "Placeholder")
        }
        assert sources <= {device_number(op.device)}, (op.name, op.type, sources)


def assert_placeholder_devices_are_named(case: str, ways: str) -> None:
    """Asserts that a stage names shards, not devices, and that work is split."""
    sharded = CASES[case].make(4, **WAYS[ways])
    data = CASES[case].data(3)
    specs = [
        tf.TensorSpec(x.shape, x.dtype)
        for x in (data if isinstance(data, list) else [data])
    ]

    def body(inputs):
        outputs = sharded(inputs if len(inputs) > 1 else inputs[0], training=True)
        return dict(enumerate(tf.nest.flatten(outputs)))

    stage = joint.trace_joint(
        body,
        input_specs=specs,
        weights=sharded.trainable_variables,
        state=sharded.non_trainable_variables,
    )
    assert not stage.captures
    named = {op.device for op in stage.graph.get_operations() if op.device}
    assert {sharding.shard_index(device) for device in named} == {0, 1, 2, 3}
    heavy = [op for op in stage.graph.get_operations() if op.type == "MatMul"]
    where = [sharding.shard_index(op.device) for op in heavy]
    split = len(where) - WHOLE.get(case, 0)
    assert [where.count(t) for t in range(4)] == [split / 4] * 4
    # Gradients of parts come from where the parts are.
    numbers = sharding.shard_indices([sharded])
    for variable, gradient in zip(
        sharded.trainable_variables, stage.backward.weight_grads, strict=True
    ):
        op = stage.graph.get_tensor_by_name(gradient.values).op
        shard = sharding.shard_index(op.device) if op.device else 0
        tied = case == "language_model" and "embeddings" in variable.path
        assert tied or shard == numbers.get(variable, 0), variable.path
