"""The ring: what goes where, and that it moves while devices multiply."""

from __future__ import annotations

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import pairwise
from tests.tensor_parallel.models import gradients
from tests.tensor_parallel.placed import device_number
from tfgpipe.tensor_parallel import TPDense, ring

DEVICES = [f"CPU:{t}" for t in range(4)]
CASES = pairwise.all_pairs(
    {
        "size": [1, 3, 10],
        "T": [1, 2, 3, 4],
        "directions": [(1,), (-1,), (1, -1)],
    }
)


@pytest.mark.parametrize(("width", "T", "directions"), CASES)
def test_chunks_of_any_size_make_the_product(width, T, directions):
    rng = np.random.default_rng(0)
    sizes = ring.device_ops.part_sizes(width, T)
    x, w = rng.standard_normal((5, width)), rng.standard_normal((width, 2 * T))
    made = ring.column(
        tf.split(x, sizes, -1), np.split(w, T, 1), DEVICES[:T], directions
    )
    np.testing.assert_allclose(tf.concat(made, -1), x @ w, rtol=1e-12, atol=1e-12)
    assert [device_number(y.device) for y in made] == list(range(T))


@pytest.mark.parametrize(("units", "T", "directions"), CASES)
def test_sums_that_go_round_are_the_product(units, T, directions):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((5, 2 * T)), rng.standard_normal((2 * T, units))
    made = ring.row(
        tf.split(x, T, -1),
        list(map(tf.constant, np.split(w, T))),
        DEVICES[:T],
        directions,
    )
    np.testing.assert_allclose(tf.concat(made, -1), x @ w, rtol=1e-12, atol=1e-12)
    assert [y.shape[-1] for y in made] == ring.device_ops.part_sizes(units, T)


@pytest.mark.parametrize("partition", ["column", "row"])
@pytest.mark.parametrize(
    ("collective", "expected"),
    [("ring", {1}), ("bidirectional_ring", {1, -1})],
)
def test_chunks_go_to_neighbours_forward_and_back(partition, collective, expected):
    graph = step(partition, collective)
    hops = set()
    for op in graph.get_operations():
        if op.type == "Identity" and op.inputs[0].device:
            a, b = device_number(op.inputs[0].device), device_number(op.device)
            if a != b and {a, b} <= {1, 2, 3}:  # The first one scatters and gathers.
                hops.add(b - a)
    # A chunk's gradient comes the way that the chunk went.
    assert hops == {*expected, *(-way for way in expected)}


@pytest.mark.parametrize("partition", ["column", "row"])
def test_no_product_waits_for_another(partition):
    """So the next chunk, or sum, moves while this one multiplies."""
    operations = step(partition, "ring").get_operations()
    products = [op for op in operations if op.type == "MatMul"]
    behind: dict[str, set[str]] = {}
    forward = products[:16]
    for op in forward:
        for x in op.inputs:
            assert not products_behind(x, behind)


def test_a_real_trace_shows_copies_during_products():
    """A chunk arrives at the next device while the one it left multiplies it."""
    with tf.Graph().as_default():
        results, feed = column_of_placeholders(size=512)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": 4})
        # It would take out the copies, which are none where memory is shared.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.compat.v1.Session(config=config) as session:
            session.run(results, feed)
            for _ in range(5):  # A busy machine may do all else first, for once.
                copies, products = traced(session, results, feed)
                assert len(products) == 16
                at_once = [
                    (a, b)
                    for a in copies
                    for b in products
                    if b.device == a.source and b.start < a.start and a.end < b.end
                ]
                if at_once:
                    return
    pytest.fail(f"No copy during a product: {copies}, {products}")


@dataclasses.dataclass(frozen=True)
class Ran:
    """An operation that ran, where and from when to when.

    Attributes:
        source: The device that a copy came from.
    """

    device: int
    start: int
    end: int
    source: int | None = None


def traced(session, results, feed):
    """Returns the copies from device to device and the products of a run."""
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    session.run(results, feed, options=options, run_metadata=metadata)
    operations = {op.name: op for op in results[0].graph.get_operations()}
    copies, products = [], []
    for stats in metadata.step_stats.dev_stats:
        device = device_number(stats.device)
        for node in stats.node_stats:
            start = node.all_start_micros
            end = start + node.all_end_rel_micros
            operation = operations.get(node.node_name)
            if operation is None:
                continue
            if operation.type == "MatMul":
                products.append(Ran(device, start, end))
            elif operation.type == "Identity":
                source = device_number(operation.inputs[0].device)
                if source not in (None, device):
                    copies.append(Ran(device, start, end, source))
    return copies, products


def column_of_placeholders(size):
    """Returns a product of columns on a ring in the current graph, and its feed."""
    devices = [f"/device:CPU:{t}" for t in range(4)]
    shapes = [(size, size), (4 * size, size)]
    given = []
    for device in devices:
        with tf.device(device):
            given.append([tf.compat.v1.placeholder(tf.float32, s) for s in shapes])
    chunks, kernels = zip(*given, strict=True)
    results = ring.column(chunks, kernels, devices, (1,))
    feed = {x: np.ones(x.shape, "float32") for x in (*chunks, *kernels)}
    return [y.op for y in results], feed


def products_behind(tensor, known):
    """Returns the names of the products that a tensor is made of."""
    op = tensor.op
    if op.type == "MatMul":
        return {op.name}
    if tensor.name not in known:
        # An IdentityN passes arguments and results of one device on together.
        inputs = op.inputs
        if op.type == "IdentityN":
            inputs = [inputs[tensor.value_index]]
        behind = [products_behind(x, known) for x in inputs]
        known[tensor.name] = set().union(*behind)
    return known[tensor.name]


@functools.cache
def step(partition, collective):
    """Returns the graph of both passes of a layer on a ring."""
    x = keras.Input((16,))
    layer = TPDense(16, partition=partition, num_shards=4, collective=collective)
    return gradients(keras.Model(x, layer(x)), np.ones((3, 16), "float32")).graph
