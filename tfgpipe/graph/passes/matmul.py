"""Matrix products in the form that TensorFlow's kernels for CPUs run fastest.

Two things make a product of a microbatch slow where that of a mini-batch is not:

* The gradient of a dense layer's input is `dy @ W^T`. The kernel copies W into blocks
  first, against the order that it lies in memory, and of few rows that takes most of
  the time. `(W @ dy^T)^T` is the same without it.
* If one edge of the result is short, oneDNN reads its operands where they lie. Rows
  that are a multiple of 4096 bytes long then fall on one another in the cache, where
  the sum goes down the rows: in `x @ W` with W `[n, 1024]` and in `x^T @ dy`. With 64
  bytes more to a row they do not.

`python -m benchmarks.studies.matmul` measures the forms.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfgpipe.graph.joint_graph import JointGraph

# Below this ratio to the longer edge of the weights, rows are few.
_FEW_ROWS_RATIO = 1 / 4
# Above this sum of the reciprocals of its edges, a result has a short edge for oneDNN.
_SHORT_EDGE_BOUND = 0.0038
# Row length at which rows share cache lines, and the padding, in elements.
_PAGE, _ROW_PADDING = 1024, 16
# A result with a shorter edge, or of sums of fewer terms, takes less than making the
# operands longer.
_MIN_EDGE, _MIN_CONTRACTION = 32, 64

Form = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def multiply(
    a: tf.Tensor, b: tf.Tensor, *, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
    """Returns a product of matrices in its fastest form."""
    form = _choose_form(a, b, transpose_a, transpose_b)
    return form(a, b) if form else tf.matmul(a, b, transpose_a, transpose_b)


def faster_matmuls(joint: JointGraph) -> JointGraph:
    """Returns a joint graph whose matrix products are in their fastest forms."""

    def form(
        op: tf.Operation, inputs: Callable[[tf.Operation], list[tf.Tensor]]
    ) -> tf.Tensor | None:
        a, b = inputs(op)
        chosen = _choose_form(a, b, *map(op.get_attr, ("transpose_a", "transpose_b")))
        return chosen(a, b) if chosen else None

    return joint.replaced(("MatMul",), form)


def is_static_float32(x: tf.Tensor) -> bool:
    """Returns whether a tensor is of float32 and of known shape."""
    return x.shape.is_fully_defined() and x.dtype == tf.float32


def _choose_form(
    a: tf.Tensor, b: tf.Tensor, transpose_a: bool, transpose_b: bool
) -> Form | None:
    """Returns a faster form of a product, or None if the plain one is best."""
    if not (is_static_float32(a) and is_static_float32(b)):
        return None
    terms, rows = a.shape if transpose_a else a.shape[::-1]
    columns = b.shape[0 if transpose_b else 1]
    if transpose_b:
        if transpose_a or rows > _FEW_ROWS_RATIO * max(b.shape):
            return None
        return lambda a, b: tf.transpose(tf.matmul(b, a, transpose_b=True))
    if terms < _MIN_CONTRACTION or min(rows, columns) < _MIN_EDGE:
        return None
    if 1 / rows + 1 / columns < _SHORT_EDGE_BOUND:
        return None
    pads_a = transpose_a and rows % _PAGE == 0
    pads_b = columns % _PAGE == 0
    if not (pads_a or pads_b):
        return None
    padding = [[0, 0], [0, _ROW_PADDING]]

    def padded_matmul(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        a = tf.pad(a, padding) if pads_a else a
        b = tf.pad(b, padding) if pads_b else b
        return tf.matmul(a, b, transpose_a)[:rows, :columns]

    return padded_matmul
