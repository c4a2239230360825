"""Products take their faster form, and give the same."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tfgpipe.graph.passes import matmul


def computed(rows, terms, columns, *, a=False, b=False, dtype=tf.float32):
    """Returns what a product `[rows, columns]` is made of, itself, and its like.

    Args:
        rows: Of the result.
        terms: Of each of its sums.
        columns: Of the result.
        a: Whether the first operand is transposed.
        b: Whether the second is.
        dtype: Of all.
    """
    left = (terms, rows) if a else (rows, terms)
    right = (columns, terms) if b else (terms, columns)
    specs = [tf.TensorSpec(left, dtype), tf.TensorSpec(right, dtype)]

    @tf.function(autograph=False)
    def product(x, y):
        return matmul.multiply(x, y, transpose_a=a, transpose_b=b)

    rng = np.random.default_rng(0)
    given = [
        tf.constant(rng.standard_normal([n or 8 for n in size]), dtype)
        for size in (left, right)
    ]
    graph = product.get_concrete_function(*specs).graph
    operations = [op.type for op in graph.get_operations()]
    return operations, product(*given), tf.matmul(*given, a, b)


def close(received, expected, atol=1e-5):
    np.testing.assert_allclose(received, expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize(("terms", "columns"), [(64, 64), (64, 32), (32, 64)])
def test_a_product_of_few_rows_is_computed_transposed(rows, terms, columns):
    """The gradient of an input, `dy @ W^T`."""
    operations, received, expected = computed(rows, terms, columns, b=True)
    assert operations.count("Transpose") == operations.count("MatMul") == 1
    close(received, expected)


@pytest.mark.parametrize(
    ("sizes", "pads"),
    [
        ({"rows": 64, "terms": 512, "columns": 1024}, 1),  # x @ W
        ({"rows": 256, "terms": 64, "columns": 2048}, 1),
        ({"rows": 256, "terms": 512, "columns": 1024, "a": True}, 1),  # x^T @ dy
        ({"rows": 1024, "terms": 512, "columns": 256, "a": True}, 1),
        ({"rows": 1024, "terms": 64, "columns": 64, "a": True}, 1),
        ({"rows": 512, "terms": 64, "columns": 1024}, 0),  # No short edge.
        ({"rows": 1024, "terms": 64, "columns": 1024, "a": True}, 0),
        ({"rows": 64, "terms": 63, "columns": 1024}, 0),  # Few terms.
        ({"rows": 31, "terms": 64, "columns": 1024}, 0),  # Few rows.
        ({"rows": 64, "terms": 1024, "columns": 1000}, 0),  # Rows apart.
        ({"rows": 64, "terms": 1024, "columns": 256}, 0),
        ({"rows": 256, "terms": 64, "columns": 256, "a": True}, 0),
    ],
)
def test_rows_that_fall_on_one_another_are_made_longer(sizes, pads):
    operations, received, expected = computed(**sizes)
    assert operations.count("Pad") + operations.count("PadV2") == pads
    assert operations.count("MatMul") == 1
    assert received.shape == (sizes["rows"], sizes["columns"])
    # A sum of a thousand terms is rounded more often than one of sixty-four.
    close(received, expected, atol=1e-5 * max(1, sizes["terms"] / 64))


@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 17, "terms": 64, "columns": 64, "b": True},
        {"rows": None, "terms": 64, "columns": 64, "b": True},
        {"rows": 8, "terms": 64, "columns": 64, "b": True, "dtype": tf.float64},
        {"rows": 8, "terms": 64, "columns": 64},
        {"rows": 8, "terms": 64, "columns": 64, "a": True, "b": True},
        {"rows": None, "terms": 64, "columns": 1024},
        {"rows": 64, "terms": 64, "columns": 1024, "dtype": tf.float64},
    ],
)
def test_other_products_are_not_rewritten(sizes):
    operations, received, expected = computed(**sizes)
    assert {"Transpose", "Pad", "PadV2"}.isdisjoint(operations)
    close(received, expected)


@pytest.mark.parametrize("remat", ["none", "stage"])
def test_a_pipeline_takes_them_and_gives_the_same_gradients(remat):
    def stack():
        widths = (1024, 64, 64)
        return [keras.layers.Dense(n, activation="tanh") for n in widths]

    # Two microbatches of 64 rows: more than is worth putting products off for.
    plain, pipelined = compare.pair(
        stack, (64,), "float32", num_stages=2, num_microbatches=2, remat=remat
    )
    x = np.random.default_rng(0).standard_normal((128, 64)).astype("float32")
    compare.assert_runs_the_same(plain, pipelined, x)
    (layer,) = (x for x in pipelined.layers if isinstance(x, tfgpipe.PipelinedLayer))
    (traced,) = (t for some in layer.stages[0]._traced.values() for t in some.values())
    programs = traced.without_remat if remat == "none" else traced.with_remat

    def types(function):
        return [op.type for op in function.graph.get_operations()]

    def pads(function):
        return types(function).count("Pad") + types(function).count("PadV2")

    # The weights that the forward multiplies by, once a step, and each one's gradient.
    assert [pads(once.function) for once in programs._hoisted.values()] == [1]
    assert pads(programs.forward.function) == 0
    assert pads(programs.backward.function) == 1
    assert "Transpose" in types(programs.backward.function)
