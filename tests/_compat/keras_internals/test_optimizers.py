"""The contract of optimizers of Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers.versions import MOVED
from tfgpipe._compat import keras_internals
from tfgpipe.distribution import optimizer as optimizer_lib


def on(device):
    return lambda: tf.device(device)


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


def test_an_optimizer_knows_a_variable_that_has_moved():
    variable = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable])
    keras_internals.variables.initialize_in_scope(variable, on("CPU:2"), None)
    optimizer.apply([tf.ones(2)], [variable])
    assert variable.numpy().tolist() == [0.0, 1.0], MOVED


def test_an_optimizer_is_applied_by_what_it_was_given():
    weight = keras.Variable([1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([weight])
    applied = []

    def apply(optimizer, grads, trainable_variables=None):
        applied.append(type(optimizer).__name__)
        type(optimizer).apply(optimizer, grads, trainable_variables)

    strategy = optimizer_lib._ColocatedStrategy(optimizer)
    keras_internals.optimizers.patch_apply(optimizer, strategy, apply)
    scale = float(optimizer.dynamic_scale.numpy())
    optimizer.apply_gradients([(tf.constant([scale]), weight)])
    assert applied == ["LossScaleOptimizer"], MOVED  # Which sums, once.
    assert weight.numpy() == [0.0], MOVED
    assert [
        v is weight for v in keras_internals.optimizers.optimizer_weights(optimizer)
    ] == [True], MOVED


def test_an_optimizer_reads_the_step_and_the_learning_rate():
    for make in (keras.optimizers.Adam, _scaling):
        optimizer = make()
        strategy = optimizer_lib._ColocatedStrategy(optimizer)
        keras_internals.optimizers.patch_apply(optimizer, strategy, lambda *_: None)
        assert keras_internals.optimizers.update_strategy(optimizer) is strategy, MOVED
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        step, rate = keras_internals.optimizers.optimizer_scalars(optimizer)
        assert step is inner.iterations, MOVED
        assert rate is inner.learning_rate, MOVED
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    scalars = keras_internals.optimizers.optimizer_scalars(
        keras.optimizers.SGD(schedule)
    )
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


@pytest.mark.parametrize(("make", "count"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_slots_are_found_by_the_weight_that_they_are_kept_for(make, count):
    # Paths that begin like another one's, and that are the same.
    weights = [
        keras.Variable(np.ones((2, size), "float32"), name=name)
        for size, name in enumerate(["w", "w_gate", "w"], 2)
    ]
    optimizer = make()
    optimizer.build(weights)
    slots = keras_internals.optimizers.optimizer_slots(optimizer)
    assert [len(slots.get(w, [])) for w in weights] == [count] * 3, MOVED
    if not isinstance(optimizer, keras.optimizers.Adafactor):
        assert all(w.shape == x.shape for w, some in slots.items() for x in some)


@pytest.mark.parametrize("given", [lambda x: x, lambda x: x.value])
def test_an_optimizer_knows_the_index_of_a_weight(given):
    weights = [keras.Variable([1.0]), keras.Variable([2.0])]
    optimizer = keras.optimizers.SGD()
    optimizer.build(weights)
    index = keras_internals.optimizers.variable_index
    assert [index(optimizer, given(x)) for x in weights] == [0, 1], MOVED


def test_weights_decay_by_learning_rates_of_their_own() -> None:
    class Halved(keras_internals.optimizers.GroupedDecay, keras.optimizers.SGD):
        def learning_rate_factor(self, weight: keras.Variable) -> float:
            return 0.5 if weight.path == "halved" else 1.0

    own = Halved(0.5, weight_decay=0.5)
    weights = [keras.Variable(1.0, name=name) for name in ("halved", "whole")]
    own.build(weights)
    own.apply([tf.constant(0.0), tf.constant(0.0)])
    assert [float(v) for v in weights] == [0.875, 0.75]
    assert float(own.learning_rate) == 0.5
