"""The contract of TensorFlow's private options of function calls."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfgpipe
from tests.helpers.traced_functions import executed_calls, traced
from tfgpipe._compat import functions

SPEC = tf.TensorSpec([None, 2], tf.float32)


def double():
    return functions.GraphFunction(
        "double", traced(lambda x: [x + x, tf.shape(x)], SPEC)
    )


def test_a_traced_function_is_not_inlined():
    def sine(x):
        return [tf.sin(x)]

    kept = functions.trace_function(sine, [SPEC], name="kept")
    x = tf.ones([3, 2])
    assert len(executed_calls(traced(lambda x: kept(x), SPEC), x)) == 1
    plain = traced(sine, SPEC)
    assert not executed_calls(traced(lambda x: plain(x), SPEC), x)


def test_a_graph_is_traced_once_with_what_it_captures():
    outside = tf.constant([1.0, 2.0])
    calls = []

    def build():
        calls.append(outside + 1.0)
        return tf.compat.v1.get_default_graph(), calls[0].op.inputs[0].name

    graph, name = functions.trace_graph(build)
    assert len(calls) == 1
    assert calls[0].graph is graph
    found = functions.captures(graph)
    assert list(found) == [name]
    assert found[name] is outside


def test_an_operation_can_forget_the_graph_it_was_traced_in():
    @tf.custom_gradient
    def identity(x):
        return x, lambda dy: dy

    def trace(x):
        with tf.compat.v1.colocate_with(x):
            return identity(tf.sin(x))

    graph_def = traced(trace, SPEC).graph.as_graph_def()
    foreign = {"_class", "_gradient_op_type"}
    assert foreign <= {name for node in graph_def.node for name in node.attr}
    for node in graph_def.node:
        functions.forget_trace(node)
        assert not foreign & set(node.attr)


def test_a_graph_definition_has_the_shapes_of_results_and_arguments():
    inner = tf.function(lambda x: tf.concat([x, x], axis=1))
    graph_def = traced(lambda x: inner(x), SPEC).graph.as_graph_def(add_shapes=True)
    calls = [node for node in graph_def.node if node.op.endswith("PartitionedCall")]
    (function,) = graph_def.library.function
    for shapes, size in (
        (functions.output_shapes(calls[0]), 4),
        (functions.input_shapes(function), 2),
    ):
        (shape,) = shapes.list.shape
        assert [dimension.size for dimension in shape.dim] == [-1, size]


def test_a_compiled_function_is_compiled_by_xla_where_it_is_called():
    compiled = functions.compiled(lambda x: x + x)
    graph = traced(lambda x: compiled(x), SPEC).graph
    (call,) = (op for op in graph.get_operations() if op.type == "PartitionedCall")
    assert call.get_attr("_XlaMustCompile")
    np.testing.assert_array_equal(compiled(tf.ones([3, 2])), np.full([3, 2], 2.0))


def test_a_tape_differentiates_only_calls_of_a_gradient():
    square = functions.GraphFunction("square", traced(lambda x: [x * x], SPEC))

    @tf.function(autograph=False)
    def derivative(x, in_gradient, persistent):
        with tf.GradientTape(persistent=persistent) as tape:
            tape.watch(x)
            with functions.gradient_calls() if in_gradient else tf.name_scope("plain"):
                (y,) = square(x)
        result = tape.gradient(y, x)
        return tf.zeros_like(x) if result is None else result

    x = tf.ones([1, 2])
    assert not np.any(derivative(x, False, False))
    for in_gradient, persistent in ((True, False), (False, True)):  # The latter: twice.
        np.testing.assert_array_equal(derivative(x, in_gradient, persistent), 2.0 * x)


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
def test_a_graph_function_computes_what_its_function_does(eagerly):
    some = double()
    call = some if eagerly else tf.function(some, autograph=False)
    doubled, shape = call(tf.ones([3, 2]))
    np.testing.assert_array_equal(doubled, np.full([3, 2], 2.0))
    np.testing.assert_array_equal(shape, [3, 2])


def test_a_call_has_the_shapes_of_what_is_called():
    some = double()
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


def test_functions_with_side_effects_run_in_order_and_once():
    log = []

    def note(x):
        tf.py_function(lambda y: log.append(float(y[0, 0])), [x], [])
        return [x + 1.0]

    some = functions.GraphFunction("note", traced(note, SPEC))

    def twice(x):
        return some(*some(x))

    tf.function(twice, autograph=False)(tf.ones([1, 2]))
    assert log == [1.0, 2.0]


def test_without_grappler_only_graph_functions_are_optimized():
    some = double()

    def step(x):
        return some(tf.function(lambda y: y + 1.0, autograph=False)(x))

    make = tf.function(step, autograph=False).get_concrete_function
    definition = functions.without_grappler(make)(SPEC).graph.as_graph_def()
    found = configs(definition)
    assert found.pop("double") == [(True, 0)]  # The wrapper function.
    assert found.pop("function") == [(False, 1)]
    assert [off for some in found.values() for off, _ in some] == [True]
    anew = tf.function(step, autograph=False).get_concrete_function(SPEC)
    plain = configs(anew.graph.as_graph_def())
    assert [off for some in plain.values() for off, _ in some].count(True) == 1


def test_inlined_calls_are_none_and_the_function_around_them_is_optimized():
    outside = tf.Variable(3.0)
    some = functions.GraphFunction("times", traced(lambda x: [x * outside], SPEC))

    def step(x):
        with functions.inlined_calls():
            (inlined,) = some(x)
        return [inlined, *some(x)]

    made = functions.without_grappler(tf.function(step, autograph=False))
    x = tf.ones([1, 2])
    before = context.context().function_call_options
    calls = executed_calls(made, x)
    # What is not inlined is called by a wrapper, which is called by the step.
    assert len(calls) == 1
    assert made.inlines
    assert context.context().function_call_options is before
    outside.assign(4.0)
    np.testing.assert_array_equal(made(x), [x * 4.0] * 2)


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


def test_a_number_of_rounds_that_the_user_sets_holds_in_graph_functions():
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.meta_optimizer_iterations = 2
    options = context.FunctionCallOptions(None, config)
    before = context.context().function_call_options
    context.context().function_call_options = options
    try:
        definition = traced(double(), SPEC).graph.as_graph_def()
    finally:
        context.context().function_call_options = before
    assert configs(definition)["function"] == [(False, 2)]


@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize("stops", [True, False])
def test_clustering_stops_at_what_may_have_a_variable_of_a_reference_type(
    stops, optimized
):
    """XLA marks what comes after as related to one, and there is none."""

    @tf.function(autograph=False)
    def step(x):
        stop = [functions.clustering_stop()] if stops else []
        with tf.control_dependencies(stop):
            return x + 1.0

    context.context().enable_run_metadata()
    try:
        optimizing = contextlib.nullcontext() if optimized else functions.grappler_off()
        with optimizing:
            assert step(tf.constant(0.0)) == 1.0
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_run_metadata()
    (node,) = (n for g in metadata.partition_graphs for n in g.node if n.name == "add")
    assert node.attr["_XlaHasReferenceVars"].b == stops
    assert functions.clustering_stop() is None


def test_only_a_tape_records():
    assert not functions.may_be_recorded()
    with tf.GradientTape() as tape:
        assert functions.may_be_recorded()
        with tape.stop_recording():
            assert not functions.may_be_recorded()


def test_fit_calls_its_steps_without_grappler():
    layers = [tf.keras.layers.Dense(2) for _ in range(2)]
    model = tfgpipe.PipelinedModel(layers, num_stages=2, num_microbatches=2)
    model.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    model.fit(x, x, verbose=0)
    model.evaluate(x, x, verbose=0)
    model.predict(x, verbose=0)
    steps = (model.train_function, model.test_function, model.predict_function)
    assert all(isinstance(step, functions.UnoptimizedFunction) for step in steps)
