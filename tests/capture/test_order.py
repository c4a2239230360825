"""The order of calls: those of one input follow one another."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfgpipe
from tests.helpers import compare
from tfgpipe.capture import Call, tracer

layers = keras.layers


def call(*inputs: int, output: int) -> Call:
    return Call(None, (), {}, inputs, (output,))


def ordered(*calls: Call, num_inputs: int) -> list[int]:
    return tracer.branches_apart(calls, range(num_inputs))


def test_two_encoders_that_take_turns():
    calls = [call(0, output=2), call(1, output=3), call(2, output=4)]
    calls += [call(3, output=5), call(4, 5, output=6)]
    assert ordered(*calls, num_inputs=2) == [0, 2, 1, 3, 4]


def test_a_branch_that_is_read_midway_stays_as_it_is():
    """Its first value is needed before its last call."""
    calls = [call(0, output=2), call(2, 1, output=3), call(2, output=4)]
    calls += [call(3, 4, output=5)]
    assert ordered(*calls, num_inputs=2) == [0, 1, 2, 3]


def test_a_late_branch_stays_late():
    calls = [call(0, 1, output=3), call(3, output=4), call(2, output=5)]
    calls += [call(4, output=6), call(5, output=7), call(6, 7, output=8)]
    assert ordered(*calls, num_inputs=3) == [0, 1, 3, 2, 4, 5]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.lists(st.lists(st.integers(0, 99), max_size=3)))
def test_each_call_is_after_those_whose_results_it_uses(num_inputs, reads):
    calls: list[Call] = []
    for i, read in enumerate(reads):
        known = num_inputs + i
        inputs = tuple({n % known for n in read})
        calls.append(Call(None, (), {}, inputs, (known,)))
    order = ordered(*calls, num_inputs=num_inputs)
    assert sorted(order) == list(range(len(calls)))
    places = {num_inputs + i: place for place, i in enumerate(order)}
    for i, each in enumerate(calls):
        before = [places[n] for n in each.input_ids if n >= num_inputs]
        assert all(place < places[num_inputs + i] for place in before)


def encoders() -> keras.Model:
    """Two encoders, not models of their own, of layers that Keras' order mixes."""
    inputs = [keras.Input((6,)) for _ in range(2)]
    ends = list(inputs)
    for _ in range(3):
        ends = [layers.Dense(8, activation="tanh")(x) for x in ends]
    return keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(ends)))


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_encoders_are_on_devices_of_their_own(schedule):
    plain, pipelined = compare.model_pair(
        encoders,
        partition=[3, 3, 2],
        num_microbatches=4,
        schedule=schedule,
    )
    assert pipelined.pipelined.pipeline.data_flow.sources == ((), (), (0, 1))
    rng = np.random.default_rng(0)
    x, y = list(rng.normal(size=(2, 8, 6))), rng.normal(size=(8, 2))
    losses = []
    for each in (plain, pipelined):
        each.compile(keras.optimizers.SGD(0.1), "mse")
        losses.append(each.fit(x, y, 8, epochs=3, shuffle=False, verbose=0).history)
    np.testing.assert_allclose(losses[0]["loss"], losses[1]["loss"], 1e-5)


@pytest.mark.parametrize(
    ("kind", "order"),
    [(layers.Dense, [1, 0, 2, 3]), (layers.BatchNormalization, [0, 1, 2, 3])],
)
def test_a_layer_that_is_shared_changes_its_state_in_the_same_order(kind, order):
    """Of two branches the first one is longer."""
    layer = kind(6) if kind is layers.Dense else kind()
    layer.build((None, 6))
    shared = [Call(layer, (), {}, (i,), (2 + i,)) for i in range(2)]
    calls = [*shared, call(2, output=4), call(3, 4, output=5)]
    assert ordered(*calls, num_inputs=2) == order


def test_a_plan_begins_a_stage_with_each():
    plan = tfgpipe.plan(
        encoders(), num_stages=3, num_microbatches=4, schedule="1f1b", batch_size=8
    )
    assert plan.calls_per_stage[:2] == (3, 3)
