"""Products of few rows are turned around, and give the same."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests import compare
from tfgpipe import products


def turned(rows, shape, *, dtype=tf.float32, transpose_a=False, transpose_b=True):
    """Returns the product of such a graph as it is, and in its other form."""

    def product(a, b):
        return tf.matmul(a, b, transpose_a, transpose_b)

    left = (shape[1], rows) if transpose_a else (rows, shape[1])
    right = shape if transpose_b else shape[::-1]
    specs = [tf.TensorSpec(left, dtype), tf.TensorSpec(right, dtype)]
    graph = tf.function(product).get_concrete_function(*specs).graph
    graph_def = graph.as_graph_def()
    products.turn(graph_def, graph)
    names = [x.op.name for x in graph.inputs]
    (output,) = (x.name for x in graph.outputs)

    def run(a, b):
        fed = dict(zip(names, (a, b), strict=True))
        return tf.graph_util.import_graph_def(
            graph_def, input_map=fed, return_elements=[output], name=""
        )[0]

    operations = [node.op for node in graph_def.node]
    rng = np.random.default_rng(0)
    given = [
        tf.constant(rng.standard_normal([n or 8 for n in size]), dtype)
        for size in (left, right)
    ]
    return operations, product(*given), tf.function(run)(*given)


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("shape", [(64, 64), (64, 32), (32, 64)])
def test_few_rows_are_turned_and_give_the_same(rows, shape):
    operations, expected, received = turned(rows, shape)
    assert operations.count("Transpose") == operations.count("MatMul") == 1
    np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rows": 17, "shape": (64, 64)},
        {"rows": None, "shape": (64, 64)},
        {"rows": 8, "shape": (64, 64), "dtype": tf.float64},
        {"rows": 8, "shape": (64, 64), "transpose_b": False},
        {"rows": 8, "shape": (64, 64), "transpose_a": True},
    ],
)
def test_all_others_stay(arguments):
    operations, expected, received = turned(**arguments)
    assert "Transpose" not in operations
    np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-5)


def test_a_pipeline_turns_them_and_gives_the_same_gradients():
    def stack():
        return [keras.layers.Dense(64, activation="relu") for _ in range(2)]

    plain, pipelined = compare.pair(
        stack, (64,), "float32", num_stages=2, num_microbatches=2, remat="none"
    )
    x = np.random.default_rng(0).standard_normal((16, 64)).astype("float32")
    gradients = []
    for model in (plain, pipelined):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        gradients.append(tape.gradient(loss, model.trainable_variables))
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    (layer,) = (x for x in pipelined.layers if isinstance(x, tfgpipe.PipelinedLayer))
    (traced,) = layer.stages[1]._traced.values()
    (traced,) = traced.values()
    operations = [
        op.type for op in traced.saving.backward.function.graph.get_operations()
    ]
    assert "Transpose" in operations
