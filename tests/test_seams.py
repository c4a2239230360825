"""The contract of each private name in `tfgpipe.seams`.

Checked with the versions below. If one of these fails after an upgrade, that seam has
moved: read its docstring, find the new place, and change `tfgpipe/seams.py` alone.
"""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import tfgpipe
from tfgpipe import seams

CHECKED = "TensorFlow 2.21, Keras 3.15"
MOVED = f"worked with {CHECKED}; here TensorFlow {tf.__version__}, Keras "
MOVED += keras.__version__


def on(device):
    return lambda: tf.device(device)


def test_an_uninitialised_variable_comes_to_life_inside_the_scope():
    layer = keras.layers.Dense(3)
    with keras.StatelessScope():
        layer.build((None, 2))
        seams.place(layer.kernel, on("CPU:3"), None)
    assert layer.kernel.value.device.endswith("CPU:3"), MOVED
    assert layer.bias.value.device.endswith("CPU:0"), MOVED


def test_an_initialised_variable_moves_with_its_value():
    variable = keras.Variable([1.0, 2.0])
    seams.place(variable, on("CPU:2"), None)
    assert variable.value.device.endswith("CPU:2"), MOVED
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_reading_without_autocast_gives_the_stored_dtype():
    class Reads(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(2,))

        def call(self, x):
            seen.append(self.w.value.dtype)
            with seams.without_autocast():
                seen.append(self.w.value.dtype)
            return x

    seen = []
    Reads(dtype="mixed_bfloat16")(tf.ones((1, 2)))
    assert seen == [tf.bfloat16, tf.float32], MOVED


def test_masks_ride_on_tensors():
    masked = keras.layers.Embedding(5, 2, mask_zero=True)(tf.constant([[1, 0]]))
    assert seams.get_mask(masked).numpy().tolist() == [[True, False]], MOVED
    plain = tf.ones((1, 2, 2))
    assert seams.get_mask(plain) is None
    seams.set_mask(plain, seams.get_mask(masked))
    output = keras.layers.LSTM(3, return_sequences=True)(plain)
    assert seams.get_mask(output) is not None, MOVED


def test_the_scope_is_found_and_takes_updates():
    variable = keras.Variable(1.0)
    with keras.StatelessScope() as scope:
        assert seams.current_stateless_scope() is scope, MOVED
        variable.assign(2.0)
        assert scope.state_mapping, MOVED
    assert scope.get_current_value(variable).numpy() == 2.0
    assert seams.current_stateless_scope() is None


def test_the_optimizer_of_the_model_being_called_is_found():
    class Looks(keras.layers.Layer):
        def call(self, x):
            found.append(seams.calling_optimizer())
            return x

    found = []
    inner = keras.Sequential([Looks()])
    model = keras.Sequential([keras.Input((2,)), inner])
    model(tf.ones((1, 2)))
    model.compile("sgd", "mse")
    model(tf.ones((1, 2)))
    assert found[-2:] == [None, model.optimizer], MOVED
    assert seams.calling_optimizer() is None, MOVED


@pytest.mark.parametrize("wrap", [False, True])
def test_slots_and_arithmetic_follow_the_variable(wrap):
    with tf.device("CPU:4"):
        variable = keras.Variable([1.0, 2.0])
    optimizer = inner = keras.optimizers.Adam(0.5)
    if wrap:
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)
    seams.update_in_place(optimizer)

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
    seams.place(variable, on("CPU:2"), None)
    optimizer.apply([tf.ones(2)], [variable])
    assert variable.numpy().tolist() == [0.0, 1.0], MOVED


def test_a_variable_has_no_value_in_the_scope_it_was_made_in():
    layer = keras.layers.Dense(2)
    with keras.StatelessScope():
        layer.build((None, 2))
        assert not seams.is_initialized(layer.kernel), MOVED
    assert seams.is_initialized(layer.kernel), MOVED


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
    assert seams.graph_of(functional) is functional, MOVED
    graph = seams.graph_of(sequential)
    assert [node.operation for node in seams.nodes(graph)] == [dense], MOVED
    for other in (
        dense,
        keras.Sequential([dense]),
        Own(inputs, dense(inputs)),
        OwnSequential([keras.Input((2,)), dense]),
        keras.ops.add,
    ):
        assert seams.graph_of(other) is None, MOVED


def test_a_graph_remembers_its_calls_and_their_arguments():
    a, b = keras.Input((3, 2)), keras.Input((4, 2))
    attention = keras.layers.MultiHeadAttention(1, 2)
    attended = attention(a, value=b, use_causal_mask=True)
    total = keras.ops.add(attended, 1.0)
    nodes = list(seams.nodes(keras.Model([a, b], total)))
    assert nodes[0].operation is attention, MOVED
    assert nodes[0].args == (a,), MOVED
    assert nodes[0].kwargs == {"value": b, "use_causal_mask": True}, MOVED
    assert nodes[0].outputs == [attended], MOVED
    assert nodes[0].inputs == [a, b], MOVED
    assert nodes[1].args == (attended, 1.0), MOVED


def test_a_graph_standardizes_what_it_is_given():
    inputs = {"b": keras.Input((1,), name="b"), "a": keras.Input((2,), name="a")}
    inputs = dict(sorted(inputs.items()))
    outputs = keras.layers.Concatenate()(list(inputs.values()))
    given = {"a": tf.ones((3, 2), tf.int32), "b": tf.zeros((3,))}
    a, b = seams.standardized(keras.Model(inputs, outputs), given)
    assert (a.dtype, a.shape, b.shape) == (tf.float32, (3, 2), (3, 1)), MOVED


def test_names_of_inner_layers_are_found():
    block = keras.Sequential([keras.layers.Dense(2, name="inner")], name="outer")
    assert seams.inner_names(block) == ["outer", "inner"], MOVED
    operation = keras.ops.add(keras.Input((2,)), 1.0)._keras_history.operation
    assert seams.inner_names(operation) == ["add"], MOVED


def test_variables_that_a_step_may_change():
    norm = keras.layers.BatchNormalization()
    norm.build((None, 2))
    frozen = keras.layers.Dense(2)
    frozen.build((None, 2))
    frozen.trainable = False
    wrapped = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
    generator = wrapped.layers[0].seed_generator
    assert seams.changeable(norm) == [norm.moving_mean, norm.moving_variance], MOVED
    assert seams.changeable(wrapped) == seams.seeds(wrapped) == [generator.state], MOVED
    assert not seams.changeable(frozen), MOVED
    norm.trainable = False
    assert not seams.changeable(norm), MOVED
