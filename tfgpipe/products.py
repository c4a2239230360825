"""Matrix products in the form that TensorFlow's kernels for CPUs run fastest.

The gradient of a dense layer's input is `dy @ W^T`. The kernel copies W into blocks
first, against the order that it lies in memory, and of a microbatch with few rows that
takes most of the time: 9.6 ms where `(W @ dy^T)^T`, which is the same, takes 2.6 ms (64
rows, 1024 x 1024 weights, one core). With more rows than a quarter of the weights' edge
that turns around. `python -m benchmarks.products` measures both.
"""

from __future__ import annotations

import tensorflow as tf

# Below this share of the longer edge of the weights, rows are few.
_FEW = 1 / 4


def turn(graph_def: tf.compat.v1.GraphDef, graph: tf.Graph) -> None:
    """Turns the products in part of a graph around where rows are few.

    Args:
        graph_def: The part. It is changed.
        graph: The whole, which knows shapes.
    """
    few = [node for node in graph_def.node if _has_few_rows(node, graph)]
    for node in few:
        inner = graph_def.node.add()
        inner.CopyFrom(node)
        inner.name = f"{node.name}/turned"
        data = [i for i in node.input if not i.startswith("^")]
        inner.input[: len(data)] = reversed(data)
        order = graph_def.node.add(op="Const", name=f"{node.name}/order")
        order.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([1, 0]))
        order.attr["dtype"].type = tf.int32.as_datatype_enum
        del node.input[:]
        node.input.extend([inner.name, order.name])
        dtype = node.attr["T"].type
        node.op = "Transpose"
        node.attr.clear()
        node.attr["T"].type = dtype
        node.attr["Tperm"].type = tf.int32.as_datatype_enum


def _has_few_rows(node: tf.compat.v1.NodeDef, graph: tf.Graph) -> bool:
    """Returns whether a node is a product `dy @ W^T` of few rows."""
    if node.op != "MatMul" or node.attr["T"].type != tf.float32.as_datatype_enum:
        return False
    if node.attr["transpose_a"].b or not node.attr["transpose_b"].b:
        return False
    left, right = (x.shape for x in graph.get_operation_by_name(node.name).inputs)
    if not (left.is_fully_defined() and right.is_fully_defined()):
        return False
    return left[0] <= _FEW * max(right)
