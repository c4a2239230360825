"""Products of batches of rows by weights, as one product of all rows.

Keras calls a dense layer of `[batch, rows, width]` as a product for each batch, whose
weights' gradient is one for each batch, too, summed. All rows together are one product,
as long as they lie behind one another:

    [B, n, i] x [i, j] -> [B, n, j]             [B * n, i] x [i, j]
    sum_B [n, i]^T x [n, j] -> [i, j]           [B * n, i]^T x [B * n, j]
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfgpipe.graph.joint_graph import JointGraph
from tfgpipe.graph.passes.matmul import is_static_float32


def flat_matmuls(joint: JointGraph) -> JointGraph:
    """Returns a joint graph whose products by weights are of all rows at once."""
    return joint.replaced(("BatchMatMulV2", "Sum"), _flat)


def _flat(
    op: tf.Operation, inputs: Callable[[tf.Operation], list[tf.Tensor]]
) -> tf.Tensor | None:
    is_sum = op.type == "Sum"
    batched = op.inputs[0].op if is_sum else op
    if batched.type != "BatchMatMulV2" or batched.get_attr("adj_x") != is_sum:
        return None
    a, b = inputs(batched)
    result = op.outputs[0]
    if not (is_static_float32(a) and is_static_float32(b)):
        return None
    # Weights have no batches, and their gradient has none once it is summed.
    weights = result if is_sum else b
    if weights.shape.rank != 2 or a.shape.rank < 3:
        return None
    if is_sum and (
        a.shape[:-1] != b.shape[:-1] or weights.shape != [a.shape[-1], b.shape[-1]]
    ):
        return None
    rows = tf.reshape(a, [-1, a.shape[-1]])
    if is_sum:
        others = tf.reshape(b, [-1, b.shape[-1]])
        product = tf.matmul(rows, others, transpose_a=True)
    else:
        product = tf.matmul(rows, b, transpose_b=op.get_attr("adj_y"))
    return tf.reshape(product, result.shape)
