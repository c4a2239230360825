"""Sums over microbatches: in which form, and that all forms are the plain sum."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, pairwise, train_steps
from tests.helpers.marks import nightly
from tests.helpers.traced_stages import traced
from tfgpipe.stage.accumulation import GradientAccumulation
from tfgpipe.stage.options import StageOptions

layers = keras.layers
WIDTH = 32


def wide(units=16, *, puts_off=True):
    """Returns the trace of layers with weights `[4, 32]` and `[32, units]`.

    A microbatch has two rows; the first layer's weights are too small to be put off.
    """
    stack = [layers.Dense(WIDTH, use_bias=False), layers.Dense(units)]
    _, stage = traced(stack, platform="cpu" if puts_off else "gpu")
    return stage.trace


def sums(trace, num_microbatches):
    options = StageOptions(platform="cpu", num_microbatches=num_microbatches)
    return GradientAccumulation(trace, options)


def built(stage, name):
    """Returns the programs of a stage of which a step has run one."""
    traced = (t for some in stage._traced.values() for t in some.values())
    (found,) = (
        programs
        for stage in traced
        for programs in stage._functions.values()
        if vars(programs).get(name) is not None
    )
    return found


def microbatch(trace, seed):
    """Returns made-up values of all that gradients are made of, and the gradients."""
    rng = np.random.default_rng(seed)
    values, gradients = {}, []
    for gradient in trace.backward.weight_grads:
        given = [rng.normal(size=trace.spec(n).shape) for n in gradient.factors]
        if given:
            values.update(zip(gradient.factors, given, strict=True))
            gradients.append(given[0].T @ given[1])
        else:
            gradients.append(rng.normal(size=trace.spec(gradient.values).shape))
        values[gradient.values] = gradients[-1]
    return {n: tf.constant(v, tf.float32) for n, v in values.items()}, gradients


FORMS = {"M": (1, 2, 3, None), "puts_off": (False, True), "graph": (False, True)}


@pytest.mark.parametrize(",".join(FORMS), pairwise.all_pairs(FORMS))
def test_all_forms_give_the_sum_of_the_gradients(M, puts_off, graph):
    trace = wide(puts_off=puts_off)
    summed = sums(trace, M)
    given = [microbatch(trace, seed) for seed in range(M or 5)]

    def total():
        results = summed.begin()
        for values, _ in given:
            results = summed.add(results, {n: values[n] for n in summed.addend_names})
        return summed.finalize(results)

    received = tf.function(total)() if graph else total()
    expected = [sum(some) for some in zip(*(g for _, g in given), strict=True)]
    assert summed.is_final == (not puts_off or M in (1, None))
    compare.assert_allclose(received, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "M"), [("cpu", 3), ("gpu", 3), ("tpu", 3), ("gpu", 1), ("cpu", 1)]
)
def test_rows_of_a_table_are_summed_within_and_between_microbatches(platform, M):
    _, stage = traced([layers.Embedding(6, 3)], first=True, dtype="int32")
    (gradient,) = stage.trace.backward.weight_grads
    summed = GradientAccumulation(
        stage.trace, StageOptions(platform=platform, num_microbatches=M)
    )
    rng = np.random.default_rng(0)
    expected = np.zeros((6, 3), "float32")
    results = summed.begin()
    for _ in range(M):
        rows = rng.integers(0, 4, (2, 4), dtype=np.int32)  # Some more than once.
        values = rng.normal(size=(2, 4, 3)).astype("float32")
        np.add.at(expected, rows, values)
        named = {gradient.indices: rows, gradient.values: values}
        results = summed.add(
            results, {name: tf.constant(x) for name, x in named.items()}
        )
    (received,) = summed.finalize(results)
    np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("M", [1, 3])
def test_replicas_need_not_wait_for_each_others_gradient_of_a_table(M):
    """TensorFlow would run stateful functions one after the other."""
    stack = [layers.Embedding(6, 3)]
    _, stage = traced(stack, first=True, dtype="int32", num_microbatches=M)
    function = stage.without_remat.backward.function.graph
    assert function.get_operations()
    assert not [op.type for op in function.get_operations() if op.op_def.is_stateful]


def test_a_microbatch_without_rows_changes_no_sum():
    trace = wide(puts_off=False)
    for M in (1, 2):
        summed = sums(trace, M)
        for total in summed.skip_empty(summed.begin()):
            assert not np.any(total)


@pytest.mark.parametrize(("units", "puts_off"), [(10, False), (11, True)])
def test_products_are_put_off_if_their_rows_take_no_more_than_the_weights(
    units, puts_off
):
    """Four microbatches of `[2, 32]` and `[2, units]`, beside `[32, units]`."""
    assert (4 * 2 * (WIDTH + units) <= WIDTH * units) == puts_off
    summed = sums(wide(units), 4)
    assert summed.is_final != puts_off
    shapes = [tuple(spec.shape) for spec in summed.specs]
    if puts_off:
        assert shapes == [(4, WIDTH), (units,), (4, 2, WIDTH), (4, 2, units), (1,)]
    else:
        assert shapes == [(4, WIDTH), (WIDTH, units), (units,)]


def test_a_weight_used_twice_is_summed_in_place():
    twice = layers.Dense(4, use_bias=False)
    _, stage = traced([twice, twice])
    (gradient,) = stage.trace.backward.weight_grads
    assert not gradient.factors
    assert sums(stage.trace, 2).is_final


def test_a_regularised_weight_is_put_off_by_its_product_alone():
    """The penalty is the gradient's of a step, once, and not part of the product."""

    def stack():
        return [
            layers.Dense(32, kernel_regularizer="l2", activation="tanh"),
            layers.Dense(32, activation="tanh"),
        ]

    compare.fresh_names()
    plain = keras.Sequential([keras.Input((32,)), *stack()])
    compare.fresh_names()
    pipelined = tfgpipe.PipelinedModel(stack(), num_stages=2, num_microbatches=2)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 8, 32)).astype("float32")
    plain(x), pipelined(x)
    compare.copy_state(plain, pipelined)
    for model in (plain, pipelined):
        model.compile(train_steps.Keeps(), "mse")
    expected, received = (
        train_steps.train(model, x, y) for model in (plain, pipelined)
    )
    rtol, atol = compare.TOLERANCES["float32"]
    train_steps.assert_same(expected, received, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("schedule", "remat"),
    nightly(
        itertools.product(["gpipe", "1f1b", "zero_bubble"], ["none", "stage"]),
        gate=[("1f1b", "stage"), ("zero_bubble", "none")],
    ),
)
def test_a_step_has_one_product_for_the_gradients_of_all_microbatches(schedule, remat):
    """Many steps of wide layers are the plain model's, step by step."""

    def stack():
        return [layers.Dense(64, activation="tanh") for _ in range(4)]

    compare.fresh_names()
    plain = keras.Sequential([keras.Input((64,)), *stack()])
    compare.fresh_names()
    pipelined = tfgpipe.PipelinedModel(
        stack(), num_stages=2, num_microbatches=4, schedule=schedule, remat=remat
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 16, 64)).astype("float32")
    plain(x), pipelined(x)
    compare.copy_state(plain, pipelined)
    losses = []
    for model in (plain, pipelined):
        model.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=model is plain)
        some = []
        for _ in range(20):
            some.append(model.train_on_batch(x, y))
            model.reset_metrics()
        losses.append(some)
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][-1] < losses[0][0] / 2
    for stage in pipelined.stages[:-1]:  # The last one ends in the loss.
        products = [
            op
            for op in built(stage, "finalize").finalize.function.graph.get_operations()
            if op.type == "MatMul" and op.outputs[0].shape == (64, 64)
        ]
        assert len(products) == 2
        assert [op.inputs[0].shape[0] for op in products] == [16, 16]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_weights_are_cast_once_a_step(schedule, mixed_precision):
    stack = [layers.Dense(8, activation="tanh") for _ in range(2)]
    model = tfgpipe.PipelinedModel(
        stack, num_stages=2, num_microbatches=4, schedule=schedule
    )
    model.compile("sgd", "mse")
    x = np.zeros((8, 8), "float32")
    model.train_on_batch(x, x)
    programs = built(model.stages[0], "forward")
    casts = [
        tuple(op.inputs[0].shape)
        for once in programs._hoisted.values()
        for op in once.function.graph.get_operations()
        if op.type == "Cast"
    ]
    assert sorted(casts) == [(8,), (8, 8)]
    for name in ("forward", "backward_weight" if schedule != "1f1b" else "backward"):
        graph = getattr(programs, name).function.graph
        halved = [
            tuple(op.outputs[0].shape)
            for op in graph.get_operations()
            if op.type == "Cast" and op.outputs[0].dtype == tf.float16
        ]
        assert (8, 8) not in halved


@pytest.mark.parametrize("training", [False, True])
def test_noise_on_weights_is_drawn_for_each_microbatch(training):
    """Nothing lasts that is random, though it is made of weights and constants."""

    class Noisy(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(64, 1024), initializer="zeros")

        def call(self, x):
            noise = tf.random.normal([64, 1024])
            return tf.matmul(x, tf.convert_to_tensor(self.kernel) + noise)

    stack = [Noisy(), layers.Dense(2, kernel_initializer="ones")]
    layer = tfgpipe.PipelinedLayer(stack, num_stages=2, num_microbatches=4)
    made = layer(tf.ones([128, 64]), training=training).numpy().reshape(4, 32, 2)
    for rows in made:
        np.testing.assert_allclose(rows, np.broadcast_to(rows[:1], rows.shape), 1e-5)
    assert len({float(rows[0, 0]) for rows in made}) == 4


def test_prediction_makes_nothing_that_only_gradients_read():
    class Tied(layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(64, 1024))

        def call(self, x):
            return tf.matmul(x, tf.convert_to_tensor(self.table), transpose_b=True)

    layer = tfgpipe.PipelinedLayer(
        [Tied(), layers.Dense(2)], num_stages=2, num_microbatches=2
    )
    x = tf.ones([128, 1024])
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(layer(x, training=False))
    programs = built(layer.stages[0], "forward")
    assert programs.hoistable
    assert not programs._hoisted
    assert tape.gradient(loss, x).shape == x.shape
    assert list(programs._hoisted) == [programs.hoistable]
