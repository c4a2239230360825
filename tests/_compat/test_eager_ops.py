"""The contract of TensorFlow's private execution of single operations."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfgpipe._compat import eager_ops


def inner(x):
    return tf.concat([x, tf.cast(tf.shape(x), x.dtype)[None]], axis=0)


COMPUTED = {
    "a list of inputs and a constant": lambda x: tf.concat([x, [[1.0, 2.0]]], axis=0),
    "a renamed argument": lambda x: tf.reduce_sum(x, axis=1, keepdims=True),
    "a function": lambda x: tf.function(inner, autograph=False)(x),
    "a condition": lambda x: tf.cond(x[0, 0] > 0, lambda: x, lambda: -x),
    "a loop with a list of tensors": lambda x: tf.map_fn(tf.cumsum, x),
    "a shape as an attribute": lambda x: tf.ensure_shape(x, [None, 2]),
    "a type as an attribute": lambda x: tf.cast(tf.argmax(x, axis=1), tf.float16),
    "text": lambda x: tf.strings.as_string(x, precision=2),
    "Python": lambda x: tf.numpy_function(np.square, [x], tf.float32),
    "several outputs": lambda x: tf.split(x, 2, axis=1)[1],
}


@pytest.mark.parametrize("name", list(COMPUTED))
def test_operations_one_by_one_compute_what_their_graph_does(name):
    concrete = tf.function(COMPUTED[name], autograph=False).get_concrete_function(
        tf.TensorSpec([None, 2])
    )
    x = tf.constant([[-1.0, 2.0], [3.0, -4.0]])
    values = {concrete.inputs[0].name: x}
    for op in concrete.graph.get_operations():
        if op.type != "Placeholder":
            inputs = [values[tensor.name] for tensor in op.inputs]
            results = eager_ops.run_operation(op, inputs)
            values.update(zip((y.name for y in op.outputs), results, strict=True))
    np.testing.assert_array_equal(values[concrete.outputs[0].name], concrete(x))
