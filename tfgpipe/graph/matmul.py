"""Matrix products in the form that TensorFlow's kernels for CPUs run fastest.

Two things make a product of a microbatch slow where that of a mini-batch is not:

* The gradient of a dense layer's input is `dy @ W^T`. The kernel copies W into blocks
  first, against the order that it lies in memory, and of few rows that takes most of
  the time. `(W @ dy^T)^T` is the same without it.
* If one edge of the result is short, oneDNN reads its operands where they lie. Rows
  that are a multiple of 4096 bytes long then fall on one another in the cache, where
  the sum goes down the rows: in `x @ W` with W `[n, 1024]` and in `x^T @ dy`. With 64
  bytes more to a row they do not.

`python -m benchmarks.products` measures the forms.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

# Below this ratio to the longer edge of the weights, rows are few.
_FEW_ROWS_RATIO = 1 / 4
# Above this sum of the reciprocals of its edges, a result has a short edge for oneDNN.
_SHORT_EDGE_BOUND = 0.0038
# Row length at which rows share cache lines, and the padding, in elements.
_PAGE, _LONGER = 1024, 16
# A result with a shorter edge, or of sums of fewer terms, takes less than making the
# operands longer.
_EDGE, _TERMS = 32, 64

Form = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def multiply(
    a: tf.Tensor, b: tf.Tensor, *, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
    """Returns a product of matrices in its fastest form."""
    form = _choose_form(a, b, transpose_a, transpose_b)
    return form(a, b) if form else tf.matmul(a, b, transpose_a, transpose_b)


def faster_matmuls(graph: tf.Graph) -> dict[str, str]:
    """Adds faster forms of a graph's matrix products to it.

    Args:
        graph: The graph. Nothing in it uses the new operations yet.

    Returns:
        By the name of each product that has a faster form, the name of that.
    """
    faster = {}
    for op in graph.get_operations():
        if op.type != "MatMul":
            continue
        a, b = op.inputs
        transpose_a, transpose_b = (
            op.get_attr("transpose_a"),
            op.get_attr("transpose_b"),
        )
        if form := _choose_form(a, b, transpose_a, transpose_b):
            with (
                graph.as_default(),
                tf.device(op.device),
                tf.control_dependencies(op.control_inputs),
            ):
                faster[op.outputs[0].name] = form(a, b).name
    return faster


def weight_gradient_factors(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns x and dy of a gradient that is `x^T @ dy`, or None if it is not.

    The sum of such products is the product of all their rows.
    """
    op = gradient.op
    while op.type in ("Identity", "Reshape"):
        op = op.inputs[0].op
    if op.type != "MatMul" or not op.get_attr("transpose_a"):
        return None
    return None if op.get_attr("transpose_b") else tuple(op.inputs)


def _choose_form(
    a: tf.Tensor, b: tf.Tensor, transpose_a: bool, transpose_b: bool
) -> Form | None:
    """Returns how to compute a product faster, or None if the plain way is best."""
    known = a.shape.is_fully_defined() and b.shape.is_fully_defined()
    if not known or a.dtype != tf.float32:
        return None
    terms, rows = a.shape if transpose_a else a.shape[::-1]
    columns = b.shape[0 if transpose_b else 1]
    if transpose_b:
        if transpose_a or rows > _FEW_ROWS_RATIO * max(b.shape):
            return None
        return lambda a, b: tf.transpose(tf.matmul(b, a, transpose_b=True))
    if terms < _TERMS or min(rows, columns) < _EDGE:
        return None
    if 1 / rows + 1 / columns < _SHORT_EDGE_BOUND:
        return None
    pads_a = transpose_a and rows % _PAGE == 0
    pads_b = columns % _PAGE == 0
    if not (pads_a or pads_b):
        return None
    padding = [[0, 0], [0, _LONGER]]

    def padded_matmul(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        a = tf.pad(a, padding) if pads_a else a
        b = tf.pad(b, padding) if pads_b else b
        return tf.matmul(a, b, transpose_a)[:rows, :columns]

    return padded_matmul
