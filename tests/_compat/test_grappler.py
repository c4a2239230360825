"""Contract of the private names behind `tfgpipe._compat.grappler`."""

from __future__ import annotations

import tensorflow as tf

from tfgpipe._compat import functions, grappler

GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
PROPERTIES = {
    "type": "GPU",
    "vendor": "NVIDIA",
    "num_cores": 132,
    "frequency": 1980,
    "memory_size": 80 << 30,
    "bandwidth": 3_350_000_000,
    "environment": {"architecture": "9.0"},
}


def _graph() -> tf.compat.v1.GraphDef:
    """A call of a function that multiplies by a product of constants."""

    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def inner(x: tf.Tensor) -> tf.Tensor:
        return x * (tf.constant(2.0) * tf.constant(3.0))

    spec = tf.TensorSpec([256, 1024])
    traced = tf.function(lambda x: inner(x), autograph=False)
    graph = traced.get_concrete_function(spec).graph.as_graph_def(add_shapes=True)
    for node in graph.node:
        node.device = GPU if node.op != "Placeholder" else ""
    return graph


def test_functions_are_optimized_for_absent_devices_and_have_shapes() -> None:
    graph = _graph()
    optimized = grappler.VirtualCluster({GPU: PROPERTIES}).optimize_functions(graph)
    assert [n.name for n in optimized.node] == [n.name for n in graph.node]
    (before,) = graph.library.function
    (after,) = optimized.library.function
    assert [n.op for n in before.node_def].count("Mul") == 2
    (product,) = [n for n in after.node_def if n.op == "Mul"]
    (shape,) = product.attr["_output_shapes"].list.shape
    assert [d.size for d in shape.dim] == [256, 1024]


def test_branches_that_are_specialized_for_a_call_are_there() -> None:
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def rate(step: tf.Tensor) -> tf.Tensor:
        half = tf.constant(0.5)
        return tf.cond(step < half, lambda: step * half, lambda: step - half)

    traced = tf.function(lambda x: rate(x), autograph=False)
    graph = traced.get_concrete_function(tf.TensorSpec([])).graph.as_graph_def()
    for node in graph.node:
        node.device = GPU if node.op != "Placeholder" else ""
    optimized = grappler.VirtualCluster({GPU: PROPERTIES}).optimize_functions(graph)
    known = {each.signature.name for each in optimized.library.function}
    branches = {
        node.attr[branch].func.name
        for function in optimized.library.function
        for node in function.node_def
        for branch in ("then_branch", "else_branch")
        if branch in node.attr
    }
    assert branches
    assert branches <= known


def test_the_peak_of_a_function_holds_its_argument_and_result() -> None:
    graph = _graph()
    cluster = grappler.VirtualCluster({GPU: PROPERTIES})
    (function,) = functions.graphs_of_functions(graph.library).values()
    assert [x.shape for x in function.inputs] == [(256, 1024)]
    size = 4 * 256 * 1024
    assert size <= cluster.peak_bytes(function) <= 3 * size + 1024


def test_a_function_comes_with_those_that_it_calls() -> None:
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def inner(x: tf.Tensor) -> tf.Tensor:
        return x + 1.0

    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def outer(x: tf.Tensor) -> tf.Tensor:
        return 2.0 * inner(x)

    traced = tf.function(lambda x: outer(x), autograph=False)
    graph = traced.get_concrete_function(tf.TensorSpec([4])).graph
    found = functions.graphs_of_functions(graph.as_graph_def().library).values()
    called = [len(each.as_graph_def().library.function) for each in found]
    assert sorted(called) == [0, 1]
    for each in found:
        grappler.VirtualCluster({GPU: PROPERTIES}).peak_bytes(each)  # Finds them.
