"""The contract of Functional models of Keras."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.helpers.versions import MOVED
from tfgpipe._compat import keras_internals


def test_only_models_that_run_their_graph_and_nothing_else_have_one():
    class Own(keras.Model):
        def call(self, x):
            return 2 * super().call(x)

    class OwnSequential(keras.Sequential):
        def call(self, x):
            return 2 * super().call(x)

    inputs = keras.Input((2,))
    dense = keras.layers.Dense(2)
    functional = keras.Model(inputs, dense(inputs))
    sequential = keras.Sequential([keras.Input((2,)), dense])
    assert keras_internals.functional.functional_graph(functional) is functional, MOVED
    graph = keras_internals.functional.functional_graph(sequential)
    assert [node.operation for node in keras_internals.functional.nodes(graph)] == [
        dense
    ], MOVED
    for other in (
        dense,
        keras.Sequential([dense]),
        Own(inputs, dense(inputs)),
        OwnSequential([keras.Input((2,)), dense]),
        keras.ops.add,
    ):
        assert keras_internals.functional.functional_graph(other) is None, MOVED


def test_a_graph_remembers_its_calls_and_their_arguments():
    a, b = keras.Input((3, 2)), keras.Input((4, 2))
    attention = keras.layers.MultiHeadAttention(1, 2)
    attended = attention(a, value=b, use_causal_mask=True)
    total = keras.ops.add(attended, 1.0)
    first, second = keras_internals.functional.nodes(keras.Model([a, b], total))
    arguments = (a,), {"value": b, "use_causal_mask": True}
    expected = keras_internals.functional.Node(
        attention, *arguments, [a, b], [attended]
    )
    assert first == expected, MOVED
    assert second.args == (attended, 1.0), MOVED


def test_a_graph_standardizes_what_it_is_given():
    inputs = {"b": keras.Input((1,), name="b"), "a": keras.Input((2,), name="a")}
    inputs = dict(sorted(inputs.items()))
    outputs = keras.layers.Concatenate()(list(inputs.values()))
    given = {"a": tf.ones((3, 2), tf.int32), "b": tf.zeros((3,))}
    a, b = keras_internals.functional.standardize_inputs(
        keras.Model(inputs, outputs), given
    )
    assert (a.dtype, a.shape, b.shape) == (tf.float32, (3, 2), (3, 1)), MOVED
