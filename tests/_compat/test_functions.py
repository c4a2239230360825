"""How functions are called: the private names of TensorFlow, and what they are for."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfgpipe
from tfgpipe._compat import functions


def traced(function, *specs):
    return tf.function(function, autograph=False).get_concrete_function(*specs)


SPEC = tf.TensorSpec([None, 2], tf.float32)


def callee():
    return functions.GraphFunction(
        "double", traced(lambda x: [x + x, tf.shape(x)], SPEC)
    )


def configs(graph_def):
    """Returns, by the name of the operation, how each call is optimized."""
    found = {}
    nodes = [
        *graph_def.node,
        *(n for f in graph_def.library.function for n in f.node_def),
    ]
    for node in nodes:
        if node.op.endswith("PartitionedCall"):
            text = node.attr["config_proto"].s
            config = tf.compat.v1.ConfigProto.FromString(text)
            rewriting = config.graph_options.rewrite_options
            found.setdefault(node.name, []).append(
                (rewriting.disable_meta_optimizer, rewriting.meta_optimizer_iterations)
            )
    return found


@pytest.mark.parametrize("eagerly", [True, False])
def test_a_callee_computes_what_its_function_does(eagerly):
    some = callee()
    call = some if eagerly else tf.function(some, autograph=False)
    doubled, shape = call(tf.ones([3, 2]))
    np.testing.assert_array_equal(doubled, np.full([3, 2], 2.0))
    np.testing.assert_array_equal(shape, [3, 2])


def test_a_call_has_the_shapes_of_what_is_called():
    some = callee()
    with tf.Graph().as_default():
        doubled, shape = some(tf.ones([3, 2]))
        assert doubled.shape.as_list() == [None, 2]
        assert shape.shape.as_list() == [2]


def test_what_a_function_captures_comes_along():
    variable = tf.Variable(3.0)
    some = functions.GraphFunction("times", traced(lambda x: [x * variable], SPEC))
    (result,) = tf.function(some, autograph=False)(tf.ones([1, 2]))
    np.testing.assert_array_equal(result, [[3.0, 3.0]])
    variable.assign(4.0)
    (result,) = tf.function(some, autograph=False)(tf.ones([1, 2]))
    np.testing.assert_array_equal(result, [[4.0, 4.0]])


def test_functions_with_effects_run_in_order_and_once():
    log = []

    def note(x):
        tf.py_function(lambda y: log.append(float(y[0, 0])), [x], [])
        return [x + 1.0]

    some = functions.GraphFunction("note", traced(note, SPEC))

    def twice(x):
        return some(*some(x))

    tf.function(twice, autograph=False)(tf.ones([1, 2]))
    assert log == [1.0, 2.0]


def test_only_callees_are_optimized_in_what_is_called_as_traced():
    some = callee()

    def step(x):
        return some(tf.function(lambda y: y + 1.0, autograph=False)(x))

    make = tf.function(step, autograph=False).get_concrete_function
    definition = functions.without_grappler(make)(SPEC).graph.as_graph_def()
    found = configs(definition)
    assert found.pop("double") == [(True, 0)]  # Its shell.
    assert found.pop("program") == [(False, 1)]
    assert [off for some in found.values() for off, _ in some] == [True]
    anew = tf.function(step, autograph=False).get_concrete_function(SPEC)
    plain = configs(anew.graph.as_graph_def())
    assert [off for some in plain.values() for off, _ in some].count(True) == 1


def test_options_are_as_before_afterwards():
    before = context.context().function_call_options
    with functions.grappler_off(), functions.grappler_off():
        inside = context.context().function_call_options
        config = tf.compat.v1.ConfigProto.FromString(inside.config_proto_serialized)
        assert config.graph_options.rewrite_options.disable_meta_optimizer
    assert context.context().function_call_options is before
    with pytest.raises(ZeroDivisionError):
        functions.without_grappler(lambda: 1 / 0)()
    assert context.context().function_call_options is before


def test_a_function_is_wrapped_once():
    once = functions.without_grappler(len)
    assert functions.without_grappler(once) is once
    assert once("four") == 4


def test_what_the_user_asks_of_grappler_holds_in_programs():
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.meta_optimizer_iterations = 2
    options = context.FunctionCallOptions(None, config)
    before = context.context().function_call_options
    context.context().function_call_options = options
    try:
        definition = traced(callee(), SPEC).graph.as_graph_def()
    finally:
        context.context().function_call_options = before
    assert configs(definition)["program"] == [(False, 2)]


def test_the_beginning_is_a_variable_of_a_reference_type():
    with tf.Graph().as_default():
        assert functions.clustering_stop().type == "VariableV2"
        with tf.experimental.function_executor_type("SINGLE_THREADED_EXECUTOR"):
            assert functions.clustering_stop() is None
    assert functions.clustering_stop() is None


def test_fit_calls_its_steps_as_traced():
    layers = [tf.keras.layers.Dense(2) for _ in range(2)]
    model = tfgpipe.PipelinedModel(layers, num_stages=2, num_microbatches=2)
    model.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    model.fit(x, x, verbose=0)
    model.evaluate(x, x, verbose=0)
    model.predict(x, verbose=0)
    made = (model.train_function, model.test_function, model.predict_function)
    assert all(isinstance(function, functions.UnoptimizedFunction) for function in made)
