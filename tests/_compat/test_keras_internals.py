"""The contract of each private name of Keras and of TensorFlow's strategies.

Checked with the versions below. If one of these fails after an upgrade, that name has
moved: read the docstring of the function that uses it, find the new place, and change
that function alone.
"""

from __future__ import annotations

import json
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.subprocesses import interpret
from tfgpipe._compat import keras_internals, tf_internals, tflite
from tfgpipe.cluster.addresses import free_ports
from tfgpipe.distribution import optimizer as optimizer_lib
from tfgpipe.distribution import pipeline_strategy as strategy_lib

CHECKED = "TensorFlow 2.21, Keras 3.15"
MOVED = f"worked with {CHECKED}; here TensorFlow {tf.__version__}, Keras "
MOVED += keras.__version__


def on(device):
    return lambda: tf.device(device)


def test_an_uninitialised_variable_comes_to_life_inside_the_scope():
    layer = keras.layers.Dense(3)
    with keras.StatelessScope():
        layer.build((None, 2))
        keras_internals.initialize_in_scope(layer.kernel, on("CPU:3"), None)
    assert layer.kernel.value.device.endswith("CPU:3"), MOVED
    assert layer.bias.value.device.endswith("CPU:0"), MOVED


class Failing(keras.layers.Layer):
    """A layer whose weight cannot be created until it is told otherwise."""

    fails = True

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(2,), initializer=self.draw)

    def draw(self, shape, dtype=None):
        if self.fails:
            raise MemoryError("out of memory")
        return tf.ones(shape, dtype)

    def call(self, x):
        return x * self.kernel


@pytest.mark.parametrize("place", [True, False])
def test_after_a_build_that_fails_keras_creates_nothing_more(place, monkeypatch):
    layers = [keras.layers.Dense(2), Failing(), keras.layers.Dense(2)]

    @keras_internals.build_scope()
    def build():
        for layer in layers:
            layer.build((None, 2))
            if place:
                for v in layer.variables:
                    keras_internals.initialize_in_scope(v, on("CPU:3"), None)

    with pytest.raises(MemoryError):
        build()
    with keras.StatelessScope():  # Would fail at the first variable of the scope above.
        pass
    monkeypatch.setattr(Failing, "fails", False)
    variables = [v for layer in layers for v in layer.variables]
    with keras_internals.build_scope():
        for v in variables:
            keras_internals.initialize_in_scope(v, on("CPU:3"), None)
    assert all(v.value.device.endswith("CPU:3") for v in variables), MOVED


def test_the_first_error_of_a_build_is_raised():
    @keras_internals.build_scope()
    def build():
        Failing().build((None, 2))
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        build()


def test_an_initialised_variable_moves_with_its_value():
    variable = keras.Variable([1.0, 2.0])
    keras_internals.initialize_in_scope(variable, on("CPU:2"), None)
    assert variable.value.device.endswith("CPU:2"), MOVED
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_a_variable_that_moved_is_the_old_one_after_an_error():
    variable = keras.Variable([1.0, 2.0])
    old = variable.value

    @keras_internals.unmoved_on_error([variable])
    def move():
        keras_internals.initialize_in_scope(variable, on("CPU:2"), None)
        assert variable.value is not old
        raise MemoryError

    with pytest.raises(MemoryError):
        move()
    assert variable.value is old, MOVED


def test_a_wrapper_takes_the_arguments_of_the_layer_inside():
    class Scales(keras.layers.Layer):
        def call(self, x, by, mask=None, by_mask=None):
            seen.append((by_mask is not None, mask is not None))
            return x * by

    class Wrapper(keras.layers.Layer):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            keras_internals.take_call_arguments_of(self, layer)

        def build(self, x_shape, by_shape):
            shapes.append((x_shape, by_shape))

        def call(self, *args, training=None, **kwargs):
            seen.append(training)
            return self.layer(*args, **kwargs)

    seen, shapes = [], []
    wrapper = Wrapper(Scales())
    by = tf.ones((2, 1))
    keras_internals.set_mask(by, tf.constant([True, False]))
    y = wrapper(tf.ones((2, 3)), by=by, training=True)
    assert y.shape == (2, 3)
    assert shapes == [((2, 3), (2, 1))], MOVED
    assert seen == [True, (True, False)], MOVED
    expected = ["x", "by", "mask", "by_mask", "training"]
    assert wrapper.call_signature_parameters == expected, MOVED


def test_reading_without_autocast_gives_the_stored_dtype():
    class Reads(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(2,))

        def call(self, x):
            seen.append(self.w.value.dtype)
            with keras_internals.without_autocast():
                seen.append(self.w.value.dtype)
            return x

    seen = []
    Reads(dtype="mixed_bfloat16")(tf.ones((1, 2)))
    assert seen == [tf.bfloat16, tf.float32], MOVED


def test_masks_ride_on_tensors():
    masked = keras.layers.Embedding(5, 2, mask_zero=True)(tf.constant([[1, 0]]))
    assert keras_internals.get_mask(masked).numpy().tolist() == [[True, False]], MOVED
    plain = tf.ones((1, 2, 2))
    assert keras_internals.get_mask(plain) is None
    keras_internals.set_mask(plain, keras_internals.get_mask(masked))
    output = keras.layers.LSTM(3, return_sequences=True)(plain)
    assert keras_internals.get_mask(output) is not None, MOVED


def test_the_scope_is_found_and_takes_updates():
    variable = keras.Variable(1.0)
    with keras.StatelessScope() as scope:
        assert keras_internals.current_stateless_scope() is scope, MOVED
        variable.assign(2.0)
        assert scope.state_mapping, MOVED
    assert scope.get_current_value(variable).numpy() == 2.0
    assert keras_internals.current_stateless_scope() is None


def test_layers_of_keras_that_their_configuration_makes_are_known():
    reshape = keras.Model(x := keras.Input((4,)), keras.ops.reshape(x, (-1, 2)))
    complete = [
        keras.layers.Dense(2),
        keras.layers.LSTM(2),
        keras.layers.BatchNormalization(),
        reshape.layers[-1],
    ]
    assert all(map(keras_internals.config_is_complete, complete)), MOVED
    others = [
        keras.layers.Lambda(lambda x: x),
        keras.layers.Normalization(),
        keras.Sequential([keras.layers.Dense(2)]),
    ]
    public = [getattr(keras.layers, name) for name in dir(keras.layers)]
    others += [
        object.__new__(kind)
        for kind in public
        if kind in (keras.layers.JaxLayer, keras.layers.TFSMLayer)
        or hasattr(kind, "adapt")
    ]
    assert not any(map(keras_internals.config_is_complete, others)), MOVED


def test_the_optimizer_of_the_model_being_called_is_found():
    class Looks(keras.layers.Layer):
        def call(self, x):
            found.append(keras_internals.calling_optimizer())
            return x

    found = []
    inner = keras.Sequential([Looks()])
    model = keras.Sequential([keras.Input((2,)), inner])
    model(tf.ones((1, 2)))
    model.compile("sgd", "mse")
    model(tf.ones((1, 2)))
    assert found[-2:] == [None, model.optimizer], MOVED
    assert keras_internals.calling_optimizer() is None, MOVED


@pytest.mark.parametrize("wrap", [False, True])
def test_slots_and_arithmetic_follow_the_variable(wrap):
    with tf.device("CPU:4"):
        variable = keras.Variable([1.0, 2.0])
    optimizer = inner = keras.optimizers.Adam(0.5)
    if wrap:
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)
    tfgpipe.place_optimizer(optimizer)

    @tf.function
    def step(gradient):
        optimizer.apply([gradient], [variable])

    concrete = step.get_concrete_function(tf.TensorSpec([2]))
    slots = [v for v in inner.variables if v.shape == (2,)]
    assert len(slots) == 2
    assert all(v.value.device.endswith("CPU:4") for v in slots), MOVED
    graphs = [concrete.graph, *_branches(concrete.graph)]
    roots = [op for g in graphs for op in g.get_operations() if op.type == "Sqrt"]
    assert roots
    assert any(op.device.endswith("CPU:4") for op in roots), MOVED
    assert not [op for op in concrete.graph.get_operations() if op.type == "IdentityN"]
    step(tf.constant([1.0, 1.0]))
    reference = keras.Variable([1.0, 2.0])
    keras.optimizers.Adam(0.5).apply([tf.constant([1.0, 1.0])], [reference])
    assert variable.numpy().tolist() == reference.numpy().tolist()


def _branches(graph):
    """Returns the graphs of the branches of conditionals in a graph."""
    from tensorflow.python.ops import cond_v2

    for op in graph.get_operations():
        if op.type in ("If", "StatelessIf"):
            yield from cond_v2.get_func_graphs(op)


def test_a_mirrored_strategy_takes_our_devices():
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2)
    with strategy.scope(), strategy.stage_scope(0):
        variable = tf.Variable([1.0])
    devices = [v.device for v in strategy.experimental_local_results(variable)]
    assert [device[-5:] for device in devices] == ["CPU:0", "CPU:2"], MOVED
    with strategy.scope():
        variable = tf.Variable([1.0])
    devices = [v.device for v in strategy.experimental_local_results(variable)]
    assert [device[-5:] for device in devices] == ["CPU:1", "CPU:3"], MOVED


def test_an_optimizer_knows_a_variable_that_has_moved():
    variable = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable])
    keras_internals.initialize_in_scope(variable, on("CPU:2"), None)
    optimizer.apply([tf.ones(2)], [variable])
    assert variable.numpy().tolist() == [0.0, 1.0], MOVED


def test_a_variable_has_no_value_in_the_scope_it_was_made_in():
    layer = keras.layers.Dense(2)
    with keras.StatelessScope():
        layer.build((None, 2))
        assert not keras_internals.is_initialized(layer.kernel), MOVED
    assert keras_internals.is_initialized(layer.kernel), MOVED


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
    assert keras_internals.functional_graph(functional) is functional, MOVED
    graph = keras_internals.functional_graph(sequential)
    assert [node.operation for node in keras_internals.nodes(graph)] == [dense], MOVED
    for other in (
        dense,
        keras.Sequential([dense]),
        Own(inputs, dense(inputs)),
        OwnSequential([keras.Input((2,)), dense]),
        keras.ops.add,
    ):
        assert keras_internals.functional_graph(other) is None, MOVED


def test_a_graph_remembers_its_calls_and_their_arguments():
    a, b = keras.Input((3, 2)), keras.Input((4, 2))
    attention = keras.layers.MultiHeadAttention(1, 2)
    attended = attention(a, value=b, use_causal_mask=True)
    total = keras.ops.add(attended, 1.0)
    first, second = keras_internals.nodes(keras.Model([a, b], total))
    arguments = (a,), {"value": b, "use_causal_mask": True}
    expected = keras_internals.Node(attention, *arguments, [a, b], [attended])
    assert first == expected, MOVED
    assert second.args == (attended, 1.0), MOVED


def test_a_graph_standardizes_what_it_is_given():
    inputs = {"b": keras.Input((1,), name="b"), "a": keras.Input((2,), name="a")}
    inputs = dict(sorted(inputs.items()))
    outputs = keras.layers.Concatenate()(list(inputs.values()))
    given = {"a": tf.ones((3, 2), tf.int32), "b": tf.zeros((3,))}
    a, b = keras_internals.standardize_inputs(keras.Model(inputs, outputs), given)
    assert (a.dtype, a.shape, b.shape) == (tf.float32, (3, 2), (3, 1)), MOVED


def test_names_of_inner_layers_are_found():
    block = keras.Sequential([keras.layers.Dense(2, name="inner")], name="outer")
    assert keras_internals.inner_names(block) == ["outer", "inner"], MOVED
    operation = keras.ops.add(keras.Input((2,)), 1.0)._keras_history.operation
    assert keras_internals.inner_names(operation) == ["add"], MOVED


def test_layers_inside_layers_are_found():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            lstm = keras.layers.LSTM(2)
            self.inner = [keras.layers.Dense(2), keras.layers.Bidirectional(lstm)]

    found = keras_internals.inner_layers(block := Block())
    dense, both = block.inner
    expected = [block, dense, both, both.forward_layer, both.backward_layer]
    assert set(expected) <= set(found), MOVED
    assert found[0] is block, MOVED
    assert keras_internals.inner_layers(keras.ops.add) == []
    dense.trainable = False
    trainable = dict(zip(found, keras_internals.is_trainable(block), strict=True))
    assert trainable[block], MOVED
    assert not trainable[dense], MOVED


def test_a_call_that_only_finds_shapes_is_recognised():
    class Looks(keras.layers.Layer):
        def call(self, x):
            found.append(keras_internals.is_symbolic_call())
            return x

    found = []
    layer = Looks()
    layer(keras.Input((2,)))
    tf.function(layer)(tf.ones((1, 2)))
    layer(tf.ones((1, 2)))
    assert found == [True, False, False], MOVED


def test_variables_that_a_step_may_change():
    norm = keras.layers.BatchNormalization()
    norm.build((None, 2))
    frozen = keras.layers.Dense(2)
    frozen.build((None, 2))
    frozen.trainable = False
    wrapped = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
    generator = wrapped.layers[0].seed_generator
    assert keras_internals.step_state(norm) == [
        norm.moving_mean,
        norm.moving_variance,
    ], MOVED
    assert (
        keras_internals.step_state(wrapped)
        == keras_internals.seed_states(wrapped)
        == [generator.state]
    ), MOVED
    assert not keras_internals.step_state(frozen), MOVED
    norm.trainable = False
    assert not keras_internals.step_state(norm), MOVED
    measured = keras.layers.Dense(2)
    measured.activity = keras.metrics.Mean()
    wrapped.compile("sgd", "mse", metrics=["mae"])
    assert (
        keras_internals.own_metrics(keras.Sequential([wrapped, measured]))
        == keras_internals.step_state(measured)
        == measured.activity.variables
    ), MOVED


def test_metrics_of_layers_are_listed_as_a_model_lists_them():
    class Outer(keras.layers.Layer):
        def __init__(self, *inner):
            super().__init__()
            self.inner = list(inner)
            self.own = keras.metrics.Mean()

        def call(self, x):
            return x

    def outers():
        return Outer(Outer(), Outer(Outer())), Outer(Outer())

    inputs = keras.Input((2,))
    first, second = outers()
    third = keras.Sequential([keras.Input((2,)), *outers()])
    functional = keras.Model(inputs, third(second(first(inputs))))
    functional.compile("sgd", "mse", metrics=["mae"])
    sequential = keras.Sequential([*outers(), *outers()])
    for model in (functional, sequential):
        expected = [x for x in model.metrics if isinstance(x, keras.metrics.Mean)]
        found = keras_internals.layer_metrics(model.layers)
        losses = [x for x in expected if x.name == "loss"]
        assert len(found) > 8
        assert [*map(id, losses), *map(id, found)] == list(map(id, expected)), MOVED


# -- compiled losses and metrics ------------------------------------------------------


def two_outputs():
    inputs = keras.Input((2,))
    outputs = [keras.layers.Dense(3, name=name)(inputs) for name in "ab"]
    return keras.Model(inputs, outputs)


def compiled_model(**arguments):
    model = two_outputs()
    arguments = {"loss": ["mse", "mae"], "loss_weights": [2.0, 0.5], **arguments}
    model.compile("sgd", **arguments)
    keras_internals.build_compiled(model, (X, [Y, Y]))
    return model


X, Y = tf.ones((4, 2)), tf.zeros((4, 3))


def test_what_a_model_was_compiled_with_is_found():
    model = two_outputs()
    model.compile(
        "sgd", ["mse", "mae"], metrics=[["mse"], []], weighted_metrics=[[], ["mae"]]
    )
    found = keras_internals.compiled(model)
    assert isinstance(found, keras_internals.CompiledState)
    assert isinstance(found.losses, keras.losses.Loss), MOVED
    assert isinstance(found.metrics, keras.metrics.Metric), MOVED
    assert found.tracker is model.metrics[0], MOVED
    assert found.tracker.name == "loss", MOVED
    keras_internals.build_compiled(model, (X, [Y, Y]))
    assert found.num_losses == 2, MOVED
    assert [tracker.name for tracker in found.loss_trackers] == ["a_loss", "b_loss"]
    ids = {id(variable) for variable in model.metrics_variables}
    assert len(found.variables) == 4, MOVED
    assert {id(variable) for variable in found.variables} < ids, MOVED


def test_a_model_without_losses_and_metrics_has_none():
    model = two_outputs()
    model.compile("sgd")
    found = keras_internals.compiled(model)
    assert (found.losses, found.metrics) == (None, None), MOVED
    assert (found.num_losses, found.loss_trackers, found.variables) == (0, [], [])
    assert keras_internals.evaluate_loss(found, None, Y, Y, None) == (None, []), MOVED
    assert keras_internals.metric_terms(found, Y, Y, None) == [], MOVED


@pytest.mark.parametrize("in_graph", [False, True])
def test_all_that_is_compiled_is_built_before_any_step(in_graph):
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("adam", "mse", metrics=["mae"])

    @tf.function
    def build(x, y):
        keras_internals.build_compiled(model, (x, y))

    build(X, Y) if in_graph else keras_internals.build_compiled(model, (X, Y))
    assert model.built, MOVED
    assert model.optimizer.built, MOVED
    assert len(keras_internals.compiled(model).variables) == 2, MOVED
    model.train_on_batch(X, Y)


def test_what_compiles_another_model_alike():
    loss, metric = keras.losses.Huber(), keras.metrics.MeanSquaredError()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD()
    model.compile(
        optimizer,
        loss,
        loss_weights=[0.5],
        metrics=[metric],
        weighted_metrics=["mae"],
        run_eagerly=True,
        steps_per_execution=3,
    )
    found = keras_internals.compile_arguments(model)
    assert found["optimizer"] is optimizer, MOVED
    assert found["loss"] is loss, MOVED
    assert found["metrics"] == [metric], MOVED
    given = {"loss_weights": [0.5], "weighted_metrics": ["mae"], "run_eagerly": True}
    assert given.items() < {k: found[k] for k in found if k != "loss"}.items(), MOVED
    assert found["steps_per_execution"] == 3, MOVED
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    other.compile(**found)
    assert other.optimizer is optimizer


def test_an_optimizer_is_applied_by_what_it_was_given():
    weight = keras.Variable([1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([weight])
    applied = []

    def apply(optimizer, grads, trainable_variables=None):
        applied.append(type(optimizer).__name__)
        type(optimizer).apply(optimizer, grads, trainable_variables)

    strategy = optimizer_lib._ColocatedStrategy(optimizer)
    keras_internals.patch_apply(optimizer, strategy, apply)
    scale = float(optimizer.dynamic_scale.numpy())
    optimizer.apply_gradients([(tf.constant([scale]), weight)])
    assert applied == ["LossScaleOptimizer"], MOVED  # Which sums, once.
    assert weight.numpy() == [0.0], MOVED
    assert [v is weight for v in keras_internals.optimizer_weights(optimizer)] == [
        True
    ], MOVED


def test_an_optimizer_reads_the_step_and_the_learning_rate():
    for make in (keras.optimizers.Adam, _scaling):
        optimizer = make()
        strategy = optimizer_lib._ColocatedStrategy(optimizer)
        keras_internals.patch_apply(optimizer, strategy, lambda *_: None)
        assert keras_internals.update_strategy(optimizer) is strategy, MOVED
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        step, rate = keras_internals.optimizer_scalars(optimizer)
        assert step is inner.iterations, MOVED
        assert rate is inner.learning_rate, MOVED
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    scalars = keras_internals.optimizer_scalars(keras.optimizers.SGD(schedule))
    assert len(scalars) == 1, MOVED


def _scaling():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))


def _several(optimizer):
    return keras.optimizers.MultiOptimizer(lambda variable: optimizer)


OPTIMIZERS = {
    "sgd": (lambda: keras.optimizers.SGD(momentum=0.9), 1),
    "adam": (keras.optimizers.Adam, 2),
    "amsgrad": (lambda: keras.optimizers.Adam(amsgrad=True), 3),
    "adafactor": (keras.optimizers.Adafactor, 3),
    "averages": (lambda: keras.optimizers.SGD(use_ema=True), 1),
    "accumulates": (
        lambda: keras.optimizers.Lion(gradient_accumulation_steps=2),
        2,
    ),
    "scales": (
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop()),
        1,
    ),
    "none": (keras.optimizers.SGD, 0),
}
if hasattr(keras.optimizers, "MultiOptimizer"):  # New in Keras 3.15.
    OPTIMIZERS["several"] = (lambda: _several(keras.optimizers.Adam()), 2)


@pytest.mark.parametrize(("make", "count"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_slots_are_found_by_the_weight_that_they_are_kept_for(make, count):
    # Paths that begin like another one's, and that are the same.
    weights = [
        keras.Variable(np.ones((2, size), "float32"), name=name)
        for size, name in enumerate(["w", "w_gate", "w"], 2)
    ]
    optimizer = make()
    optimizer.build(weights)
    slots = keras_internals.optimizer_slots(optimizer)
    assert [len(slots.get(w, [])) for w in weights] == [count] * 3, MOVED
    if not isinstance(optimizer, keras.optimizers.Adafactor):
        assert all(w.shape == x.shape for w, some in slots.items() for x in some)


def test_a_variable_is_shown_as_one_of_its_copies():
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
    copies = strategy.experimental_local_results(variable.value)
    with (
        tf_internals.without_strategy(),
        keras_internals.view_as_copies([(variable, copies[1])]),
    ):
        variable.assign_add([1.0, 1.0])
        assert variable.numpy().tolist() == [2.0, 3.0], MOVED
    assert copies[0].numpy().tolist() == [1.0, 2.0], MOVED
    assert copies[1].numpy().tolist() == [2.0, 3.0], MOVED


def test_there_is_a_scope_of_no_strategy():
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    with strategy.scope():
        with tf_internals.without_strategy():
            assert not tf.distribute.has_strategy(), MOVED
            assert not tf.distribute.in_cross_replica_context(), MOVED
        assert tf.distribute.get_strategy() is strategy, MOVED


@pytest.mark.parametrize("eager", [False, True])
def test_a_function_that_makes_variables_is_traced_twice(eager):
    """And once if they are made outside of it."""
    variables, traces = [], []
    scope = tf_internals.eager_variables if eager else tf.init_scope

    @tf.function
    def step(x):
        traces.append(x)
        if not variables:
            with scope():
                variables.append(tf.Variable(2.0))
        return x * variables[0]

    assert step(tf.constant(3.0)) == 6
    assert len(traces) == (1 if eager else 2), MOVED


def test_variables_outside_of_functions_are_those_of_the_strategy():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    made = []

    @tf.function
    def step():
        if not made:
            with tf_internals.eager_variables(), strategy.scope():
                made.append(tf.Variable(2.0))
        return made[0] + 1.0

    assert step() == 3
    assert len(strategy.experimental_local_results(made[0])) == 2


@pytest.mark.parametrize("devices", [("CPU:5", "CPU:6"), ("CPU:5",)])
def test_a_variable_is_colocated_with_devices_of_a_strategy(devices):
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    with strategy.scope():
        colocated = tf_internals.colocation(devices)
        with tf.variable_creator_scope(
            lambda create, **kwargs: create(**{**kwargs, "colocate_with": colocated})
        ):
            variable = tf.Variable([1.0])
    copies = strategy.experimental_local_results(variable)
    assert [copy.device[-5:] for copy in copies] == list(devices), MOVED


def test_a_strategy_makes_a_variable_on_one_replica_alone():
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    with strategy.scope(), strategy_lib.device_scope(("CPU:5",)):
        variable = tf.Variable([1.0])
    assert variable.device.endswith("CPU:5"), MOVED
    assert strategy.experimental_local_results(variable) == (variable,), MOVED


def test_a_model_of_replicas_is_built_on_what_the_first_gets():
    """Keras takes the mean over replicas, which have three, three and two rows."""
    built = []

    class Model(keras_internals.Replicated):
        def build(self, shape):
            built.append(shape)
            self.dense = keras.layers.Dense(1)
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    with compare.mirrored(3).scope():
        model = Model()
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=8, verbose=0)
    assert built == [(3, 2)], MOVED


@pytest.mark.usefixtures("mixed_precision")
def test_an_optimizer_that_scales_the_loss_is_handed_on_as_it_is():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    found = keras_internals.compile_arguments(model)
    assert isinstance(found["optimizer"], keras.optimizers.LossScaleOptimizer), MOVED
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    other.compile(**found)
    assert other.optimizer is model.optimizer


def test_losses_are_evaluated_anew_with_what_keras_gives_them():
    model = compiled_model()
    found = keras_internals.compiled(model)
    seen = []

    def evaluate(i, loss, target, output, weight):
        seen.append((i, loss.name, target, output, weight))
        return tf.constant(10.0 + i)

    outputs, weights = [tf.ones((4, 3)), tf.ones((4, 3))], [tf.ones(4), tf.zeros(4)]
    targets = {"b": Y, "a": Y + 1.0}
    total, each = keras_internals.evaluate_loss(
        found, evaluate, targets, outputs, weights
    )
    assert [entry[:2] for entry in seen] == [(0, "mse"), (1, "mae")], MOVED
    assert [float(entry[2][0, 0]) for entry in seen] == [1.0, 0.0], MOVED
    for entry, output, weight in zip(seen, outputs, weights, strict=True):
        assert entry[3] is output, MOVED
        assert entry[4] is weight, MOVED
    assert float(total) == 2.0 * 10.0 + 0.5 * 11.0, MOVED
    assert [float(value) for value in each] == [10.0, 11.0], MOVED


def test_losses_are_those_of_keras_again_afterwards():
    model = compiled_model()
    found = keras_internals.compiled(model)

    def fails(*_):
        raise ArithmeticError

    outputs = [tf.ones((4, 3)), tf.ones((4, 3))]
    with pytest.raises(ArithmeticError):
        keras_internals.evaluate_loss(found, fails, [Y, Y], outputs, None)
    assert not any(np.any(v) for m in found.loss_trackers for v in m.variables)
    assert float(found.losses([Y, Y], outputs)) == 2.5, MOVED
    assert [float(m.result()) for m in found.loss_trackers] == [1.0, 1.0], MOVED


def test_metrics_come_with_what_keras_updates_them_with():
    model = compiled_model(
        metrics={"b": ["mse"]}, weighted_metrics={"a": ["mae", "mse"], "b": ["mae"]}
    )
    outputs = {"a": tf.ones((4, 3)), "b": tf.ones((4, 3)) * 2.0}
    targets, weights = {"b": Y + 1.0, "a": Y}, {"a": tf.ones(4), "b": tf.zeros(4)}
    # As the model returns them, in a list.
    given = (targets, [*outputs.values()], weights)
    terms = keras_internals.metric_terms(keras_internals.compiled(model), *given)
    found = [
        (
            term.metric.name,
            float(term.target[0, 0]),
            float(term.output[0, 0]),
            None if term.weight is None else float(term.weight[0]),
        )
        for term in terms
    ]
    assert found == [
        ("mse", 1.0, 2.0, None),
        ("mae", 0.0, 1.0, 1.0),
        ("mse", 0.0, 1.0, 1.0),
        ("mae", 1.0, 2.0, 0.0),
    ], MOVED
    assert [term.metric for term in terms] == keras_internals.compiled(
        model
    ).metrics.metrics
    (one,) = {
        float(term.weight[0])
        for term in keras_internals.metric_terms(
            keras_internals.compiled(model), targets, given[1], tf.ones(4) * 3.0
        )
        if term.weight is not None
    }
    assert one == 3.0, MOVED


def test_metrics_and_losses_are_paired_by_structure_not_by_value():
    """Shapes and types do as well as tensors."""
    model = compiled_model(metrics=[["mse"], ["mae"]])
    specs = [tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3], tf.float64)]
    found = keras_internals.compiled(model)
    terms = keras_internals.metric_terms(found, specs, specs, None)
    assert terms == [
        keras_internals.MetricTerm(metric, spec, spec, None)
        for metric, spec in zip(found.metrics.metrics, specs, strict=True)
    ], MOVED
    seen = []

    def evaluate(i, loss, target, output, weight):
        seen.append((target, output))
        return tf.zeros([])

    keras_internals.evaluate_loss(found, evaluate, specs, specs, None)
    assert seen == [(spec, spec) for spec in specs], MOVED


def test_the_operations_of_a_tflite_file_have_kinds_names_and_types(tmp_path):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Softmax(name="last")]
    )
    model.export(str(tmp_path / "model.tflite"), format="litert", verbose=False)
    interpreter = tf.lite.Interpreter(
        str(tmp_path / "model.tflite"),
        experimental_op_resolver_type=(
            tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        ),
    )
    product, softmax = tflite.lite_operations(interpreter)
    assert "dense" in product.name, MOVED
    assert product == tflite.LiteOp(
        "FULLY_CONNECTED", product.name, frozenset({np.float32})
    ), MOVED
    assert softmax.kind == "SOFTMAX", MOVED


def test_a_strategy_updates_inside_what_it_is_told():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    updated = []

    def scope_of(variable):
        updated.append(variable)
        return tf.name_scope("there")

    tf_internals.patch_update_scope(strategy, scope_of)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])
    step = tf.function(lambda: optimizer.apply([tf.ones(2)], [variable]))
    strategy.run(step)
    assert variable.numpy().tolist() == [-1.0, 0.0]
    assert any(x is variable.value for x in updated), MOVED


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        (keras.metrics.SparseCategoricalAccuracy(), "higher"),
        (keras.metrics.MeanIoU(2), "higher"),
        (keras.metrics.AUC(), "higher"),
        (keras.metrics.SparseCategoricalCrossentropy(), "lower"),
        (keras.metrics.MeanAbsoluteError(), "lower"),
        (keras.metrics.MeanMetricWrapper(keras.losses.huber), "lower"),
        (keras.metrics.Mean(), None),
        (keras.metrics.FalseNegatives(), None),
    ],
)
def test_a_metric_says_which_of_its_values_is_better(metric, better):
    assert keras_internals.preferred_direction(metric) == better, MOVED


def test_tensorflow_gives_silent_processes_up_when_it_is_told_to():
    """In a process of its own, since TensorFlow must not have started."""
    (port,) = free_ports(1)
    config = {
        "cluster": {"worker": [f"127.0.0.1:{port}"]},
        "task": {"type": "worker", "index": 0},
    }
    code = (
        "import tensorflow as tf\n"
        "from tensorflow.python.eager import context\n"
        "from tfgpipe._compat import tf_internals\n"
        "resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()\n"
        f"tf_internals.{tf_internals.set_heartbeat_timeout.__name__}"
        "(resolver.cluster_spec(), 45.0)\n"
        "tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)\n"
        "found = context.context().config.experimental.coordination_config\n"
        "(job,) = found.coordinated_job_list\n"
        "print(found.heartbeat_timeout_in_ms, found.service_type, job.num_tasks)\n"
    )
    run = interpret(code, TF_CONFIG=json.dumps(config))
    assert run.stdout == "45000 standalone 1\n", MOVED + run.stderr


def test_two_threads_take_a_layer_for_a_subclass_one_after_the_other():
    class Other(keras.layers.Dense):
        pass

    layer = keras.layers.Dense(2)
    entered = threading.Event()

    def enter():
        with keras_internals.as_subclasses([(layer, Other)]):
            entered.set()

    thread = threading.Thread(target=enter)
    with keras_internals.as_subclasses([(layer, Other)]):
        thread.start()
        assert not entered.wait(0.2)
    thread.join(10)
    assert entered.is_set()
    assert type(layer) is keras.layers.Dense


def test_a_layer_is_of_a_subclass_for_a_while():
    class Doubled(keras.layers.Dense):
        def call(self, inputs, training=None):
            return 2 * super().call(inputs)

    layer = keras.layers.Dense(2)
    x = np.ones((1, 3), "float32")
    plain = layer(x)
    outer = keras.Sequential([layer])
    with keras_internals.as_subclasses([(layer, Doubled)]):
        assert isinstance(layer, Doubled), MOVED
        np.testing.assert_array_equal(outer(x), 2 * plain, MOVED)
    assert type(layer) is keras.layers.Dense
    np.testing.assert_array_equal(outer(x), plain, MOVED)
