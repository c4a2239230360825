"""Keyword inputs reach every layer that asks for them, on whatever stage it is."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, zoo
from tests.helpers.plain_pairs import Chain, assert_fits_the_same
from tests.helpers.zoo import floats

layers = keras.layers


def side_pair(make, x, sides, **arguments):
    plain = Chain(make())
    pipelined = tfgpipe.PipelinedLayer(make(), **arguments)
    for model in (plain, pipelined):
        model(x, **sides)
    compare.copy_state(plain, pipelined)
    return plain, pipelined


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "rows", "sizes", "remat", "dtype"),
    [
        (2, 3, 5, "unknown", "none", "float32"),
        (3, 2, 6, "static", "stage", "float64"),
        (4, 5, 3, "unknown", "layer", "float64"),
    ],
)
def test_side_inputs_reach_every_layer_that_asks(
    num_stages, num_microbatches, rows, sizes, remat, dtype, floatx
):
    floatx(dtype)
    x, sides = floats(rows, 5, 4), zoo.side_inputs(rows, 5)
    plain, pipelined = side_pair(
        zoo.side_fed,
        x,
        sides,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        remat=remat,
    )
    specs = None
    if sizes == "unknown":
        specs = compare.unknown_sizes(x, sides, axes=2)
    expected = compare.run(plain, x, side_inputs=sides, graph=False)
    received = compare.run(pipelined, x, side_inputs=sides, specs=specs)
    rtol, atol = compare.TOLERANCES[dtype]
    compare.assert_same(expected, received, rtol=rtol, atol=atol)
    # Of x and of scale, and of no integers or booleans.
    present = [grad is not None for grad in received.input_grads]
    assert present == [x.dtype.kind == "f" for x in keras.tree.flatten((x, sides))]


def test_side_inputs_go_only_to_the_stages_that_ask():
    x, sides = floats(4, 5, 4), zoo.side_inputs(4, 5)
    layer = tfgpipe.PipelinedLayer(
        zoo.side_fed(), partition=[1] * 8, num_microbatches=2, jit_compile=False
    )

    @tf.function
    def call(x, sides):
        return layer(x, **sides)

    layer(x, **sides)
    readers = {
        "lengths": [1],
        "segment_ids": [2, 5],
        "allowed": [2, 5],
        "scale": [3, 6],
    }
    numbers = {name: 1 + i for i, name in enumerate(sides)}  # After x.
    for name, number in numbers.items():
        stages = [
            k for k, s in enumerate(layer.stages) if number in s.segment.input_ids
        ]
        assert stages == readers[name]
    graph = call.get_concrete_function(
        *keras.tree.map_structure(lambda a: tf.TensorSpec(a.shape, a.dtype), (x, sides))
    ).graph
    calls = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
    types = {k: set() for k in range(8)}
    for op in calls:
        types[int(op.device.rsplit(":")[-1])].update(t.dtype for t in op.inputs)
    assert types[0] == types[4] == types[7] == {tf.float32}
    assert types[2] == types[5] == {tf.float32, tf.int32, tf.bool}


def test_side_inputs_may_be_left_out_later():
    make = lambda: [zoo.Forgets(), layers.Dense(3), zoo.Scales()]  # noqa: E731
    x, sides = floats(4, 5, 4), zoo.side_inputs(4, 5)
    sides = {name: sides[name] for name in ("lengths", "scale")}
    plain, pipelined = side_pair(make, x, sides, num_stages=3, num_microbatches=2)
    for names in (["lengths"], ["scale"], []):
        some = {name: sides[name] for name in names}
        compare.assert_runs_the_same(plain, pipelined, x, side_inputs=some)
        nones = {name: sides[name] if name in names else None for name in sides}
        np.testing.assert_array_equal(pipelined(x, **nones), pipelined(x, **some))


def test_a_side_input_that_is_none_from_the_start():
    layer = tfgpipe.PipelinedLayer(
        [zoo.Scales(), layers.Dense(2)], num_stages=2, num_microbatches=2
    )
    x = floats(4, 5, 3)
    np.testing.assert_allclose(layer(x, scale=None), layer.layers[1](x), 1e-5, 1e-6)


def test_side_inputs_through_a_functional_model_around_the_layer():
    x, scale = keras.Input((5, 4)), keras.Input((), name="scale")
    lengths = keras.Input((), dtype="int32", name="lengths")

    def make(pipelined):
        stack = [layers.Dense(4), zoo.Forgets(), layers.Dense(3), zoo.Scales()]
        chain = (
            tfgpipe.PipelinedLayer(stack, num_stages=3, num_microbatches=2)
            if pipelined
            else Chain(stack)
        )
        y = chain(x, lengths=lengths, scale=scale)
        return keras.Model([x, lengths, scale], y)

    plain, pipelined = make(False), make(True)
    compare.copy_state(plain, pipelined)
    sides = zoo.side_inputs(10, 5)
    data = [floats(10, 5, 4), sides["lengths"], sides["scale"]]
    compare.assert_runs_the_same(plain, pipelined, data)
    assert_fits_the_same(
        plain, pipelined, data, floats(10, 5, 3), lambda: {"loss": "mse"}
    )
