"""Matrix products in the form that TensorFlow's kernels for CPUs run fastest.

Two things make a product of a microbatch slow where that of a mini-batch is not:

* The gradient of a dense layer's input is `dy @ W^T`. The kernel copies W into blocks
  first, against the order that it lies in memory, and of few rows that takes most of
  the time. `(W @ dy^T)^T` is the same without it.
* If one edge of the result is short, oneDNN reads its operands where they lie. Rows
  that are a multiple of 4096 bytes long then fall on one another in the cache, where
  the sum goes down the rows: in `x @ W` with W `[n, 1024]` and in `x^T @ dy`. With 64
  bytes more to a row they do not.

A third is how Keras calls them: a dense layer of batches of rows is a product for each
batch, whose weights' gradient is one for each batch, too, summed. All rows together are
one product, as long as they lie behind one another.

`python -m benchmarks.products` measures the forms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

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


def products_of_rows(graph: tf.Graph) -> dict[str, str]:
    """Adds products of all rows to a graph, for its products of batches of rows.

    Args:
        graph: The graph. Nothing in it uses the new operations yet.

    Returns:
        By the name of each result that has such a form, the name of that.
    """
    made = {}
    for op in graph.get_operations():
        batched = op.inputs[0].op if op.type == "Sum" else op
        if batched.type != "BatchMatMulV2" or batched.get_attr("adj_x") != (
            batched is not op
        ):
            continue
        a, b = batched.inputs
        result = op.outputs[0]
        if not (_is_float32_of_known_shape(a) and _is_float32_of_known_shape(b)):
            continue
        # Weights have no batches, and their gradient has none once it is summed.
        weights = b if batched is op else result
        if weights.shape.rank != 2 or a.shape.rank < 3:
            continue
        if batched is not op and (
            a.shape[:-1] != b.shape[:-1] or weights.shape != [a.shape[-1], b.shape[-1]]
        ):
            continue
        with _beside(op):
            rows = tf.reshape(a, [-1, a.shape[-1]])
            if batched is op:
                product = tf.matmul(rows, b, transpose_b=op.get_attr("adj_y"))
            else:
                others = tf.reshape(b, [-1, b.shape[-1]])
                product = tf.matmul(rows, others, transpose_a=True)
            made[result.name] = tf.reshape(product, result.shape).name
    return made


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
            with _beside(op):
                faster[op.outputs[0].name] = form(a, b).name
    return faster


def weight_gradient_factors(
    gradient: tf.Tensor, forms: Mapping[str, str] | None = None
) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns x and dy of a gradient that is `x^T @ dy`, or None if it is not.

    The sum of such products is the product of all their rows.

    Args:
        gradient: The gradient.
        forms: Names of tensors, and of those to use in their place: see
            `products_of_rows`.
    """
    forms = forms or {}
    while True:
        if gradient.name in forms:
            gradient = gradient.graph.get_tensor_by_name(forms[gradient.name])
        if gradient.op.type not in ("Identity", "Reshape"):
            break
        gradient = gradient.op.inputs[0]
    op = gradient.op
    if op.type != "MatMul" or not op.get_attr("transpose_a"):
        return None
    return None if op.get_attr("transpose_b") else tuple(op.inputs)


@contextlib.contextmanager
def _beside(op: tf.Operation) -> Iterator[None]:
    """Operations added inside are in the place of another."""
    with (
        op.graph.as_default(),
        tf.device(op.device),
        tf.control_dependencies(op.control_inputs),
    ):
        yield


def _is_float32_of_known_shape(x: tf.Tensor) -> bool:
    return x.shape.is_fully_defined() and x.dtype == tf.float32


def _choose_form(
    a: tf.Tensor, b: tf.Tensor, transpose_a: bool, transpose_b: bool
) -> Form | None:
    """Returns how to compute a product faster, or None if the plain way is best."""
    if not (_is_float32_of_known_shape(a) and _is_float32_of_known_shape(b)):
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
