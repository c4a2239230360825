"""What the programs of a stage compute, and what one hands to another."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.traced_stages import ROWS, WIDTH, dense, products, traced
from tfgpipe import remat as remats

layers = keras.layers


@pytest.mark.parametrize("depth", [1, 3])
def test_halves_of_a_backward_within_a_pipeline(depth):
    """Each layer has one product for the gradient of its input, one for its weight's.

    What recomputation adds, a product for each layer, is in the first half alone.
    """
    _, stage = traced(dense(depth))
    assert products(stage.without_remat.backward) == 2 * depth
    assert products(stage.without_remat.backward_input) == depth
    assert products(stage.without_remat.backward_weight) == depth
    assert products(stage.with_remat.backward_input) == 2 * depth
    assert products(stage.with_remat.backward_weight) == depth


def test_products_are_saved_and_what_lies_between_is_recomputed():
    def activations(some):
        operations = some.function.graph.get_operations()
        return sum(op.type == "Tanh" for op in operations)

    _, stage = traced(dense(), remat="products")
    some = stage.with_remat
    assert [stage.trace.operation(x).type for x in some.residuals] == ["MatMul"] * 3
    assert products(some.backward) == products(stage.without_remat.backward)
    assert (activations(some.forward), activations(some.backward)) == (3, 3)
    # Of operations that one names, the same.
    named = remats.ProductsRemat(ops=("Tanh",))
    _, stage = traced(dense(), remat=named)
    assert {stage.trace.operation(x).type for x in stage.with_remat.residuals} == {
        "Tanh"
    }
    assert activations(stage.with_remat.backward) == 0


def test_shards_on_gpus_have_their_seeds_made_by_the_host():
    """XLA compiles other stages there, and has no need of it."""
    sharded = tfgpipe.layers.TPMLP(4, units=WIDTH, dropout=0.5, num_shards=2)
    options = {"platform": "gpu", "jit_compile": "auto", "num_microbatches": 2}
    _, stage = traced([sharded], **options)
    assert stage.with_remat.host is not None
    _, stage = traced([layers.Dropout(0.5)], **options)
    assert stage.with_remat.host is None


@pytest.mark.parametrize("depth", [1, 3])
def test_halves_of_the_first_stages_backward(depth):
    """Nobody wants the gradient of the pipeline's input."""
    _, stage = traced(dense(depth), first=True)
    assert products(stage.without_remat.backward) == 2 * depth - 1
    assert products(stage.without_remat.backward_input) == depth - 1
    assert products(stage.without_remat.backward_weight) == depth


def test_the_first_half_makes_no_gradient_of_a_weight():
    """Whatever leads to a weight's is in the second: their products have other shapes.

    Of [rows, width] by [width, width] that of an input, of [width, rows] by [rows,
    width] that of a weight.
    """
    _, stage = traced(dense())
    shapes = [
        op.outputs[0].shape.as_list()
        for op in stage.without_remat.backward_input.function.graph.get_operations()
        if op.type == "MatMul"
    ]
    assert shapes == [[ROWS, WIDTH]] * 3
    shapes = [
        op.outputs[0].shape.as_list()
        for op in stage.without_remat.backward_weight.function.graph.get_operations()
        if op.type == "MatMul"
    ]
    assert shapes == [[WIDTH, WIDTH]] * 3


def test_weightless_layers_leave_nothing_to_the_second_half():
    _, stage = traced([layers.Activation("tanh"), layers.Activation("gelu")])
    second = stage.with_remat.backward_weight
    assert second.fetches == second.feeds == ()


STACKS = {
    "dense": dense,
    "normalised": lambda: [
        layers.Dense(WIDTH),
        layers.LayerNormalization(),
        layers.Dense(WIDTH, activation="gelu"),
    ],
    "dropped": lambda: [
        layers.Dense(WIDTH),
        layers.Dropout(0.5, seed=1),
        layers.Dense(WIDTH, activation="relu"),
    ],
    "one layer twice": lambda: [layers.Dense(WIDTH, activation="tanh")] * 3,
    "frozen": lambda: [
        layers.Dense(WIDTH, activation="tanh"),
        layers.Dense(WIDTH, trainable=False, activation="tanh"),
        layers.Dense(WIDTH),
    ],
}


@pytest.mark.parametrize(("remat", "first"), [("stage", True), ("layer", False)])
@pytest.mark.parametrize("name", STACKS)
def test_the_halves_make_what_the_whole_makes(name, remat, first, floatx):
    """Both of a stage that saves, and of one that recomputes."""
    floatx("float64")
    stage, made = traced(STACKS[name](), first=first, dtype="float64", remat=remat)
    for programs in (made.without_remat, made.with_remat):
        assert_halves_make_the_whole(stage, made.trace, programs, first)


def assert_halves_make_the_whole(stage, trace, programs, first):
    rng = np.random.default_rng(0)
    held = [*stage.weights, *stage.state]
    values = dict(zip((*trace.given.weights, *trace.given.state), held, strict=True))
    values = {n: tf.convert_to_tensor(v.value) for n, v in values.items()}
    values[trace.given.inputs[0]] = tf.constant(rng.normal(size=(ROWS, WIDTH)))
    values[trace.backward.output_grads[0]] = tf.constant(rng.normal(size=(ROWS, WIDTH)))
    kept, _ = programs.forward(values)
    values.update(kept)
    sums = programs.accumulation.begin()
    whole, expected = programs.backward(values, sums)
    first_half, nothing = programs.backward_input(values, [])
    assert not nothing
    sums = programs.accumulation.begin()
    second_half, received = programs.backward_weight({**values, **first_half}, sums)
    assert not second_half
    assert len(expected) == len(received) == len(stage.weights) > 0
    for a, b in zip(expected, received, strict=True):
        assert np.any(a)
        compare.close(a.numpy(), b.numpy(), "weight", *compare.TOLERANCES["float64"])
    assert len(whole) == (not first)
    for gradient, value in whole.items():
        np.testing.assert_array_equal(value, first_half[gradient])
