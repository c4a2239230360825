"""Layers that T devices share, beside sums by hand; devices and layers are toys."""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.planner_toys import TOY, config, layer, staged, workload
from tfgpipe.planner import memory, step_time
from tfgpipe.planner.parallel_config import enumerate_configs
from tfgpipe.planner.shard_axes import POSITIONS, UNITS

pytestmark = pytest.mark.pure

HALVES = {"examples": 2, "num_shards": 2, "dtype": "float32"}


def attention(**values):
    return layer(max_parts=4, keys_values=3.0, **values)


def test_parts_of_a_sequence_share_arithmetic_and_not_weights():
    # Of 2 examples: 100 FLOP at 100 a second, all 10 weights of 4 bytes at 10 a second,
    # and half of 20 bytes at 10 a second, of which none is whole.
    given = {**HALVES, "device": TOY, "axis": POSITIONS}
    seconds = step_time.layer_seconds(attention(), **given)
    assert seconds.forward == pytest.approx(1 + 4 + 1)
    assert seconds.backward == pytest.approx(2 + 10 * (4 + 8) / 10 + 2)
    rates = {"forward": ((4.0, 50.0), (8.0, 100.0)), "backward": ((4.0, 50.0),)}
    measured = dataclasses.replace(TOY, rates=rates)
    # Of 2 examples there are 4 rows in each part.
    four = {**given, "device": measured}
    assert step_time.layer_seconds(attention(positions=4), **four).forward == 2 + 1


def test_parts_of_a_sequence_exchange_keys_values_and_weights():
    given = {**HALVES, "device": TOY}
    seconds = POSITIONS.exchange_seconds(attention(), **given)
    # 10 bytes of outputs there and back, twice; 6 of keys and values, half each; 40 of
    # weights; at 5 a second, and 1/4 for each message.
    outputs, ring, weights = 2 * (10 / 5 + 2 / 4), 6 / 2 / 5 + 1 / 4, 40 / 5 + 1 / 4
    assert seconds.forward == pytest.approx(outputs + ring + weights)
    assert seconds.backward == pytest.approx(outputs + 2 * ring + weights)
    three = {**given, "num_shards": 3}
    assert not POSITIONS.exchange_seconds(attention(), **three).forward
    assert not POSITIONS.exchange_seconds(layer(), **given).forward


def test_parts_of_a_sequence_hold_whole_weights_and_their_activations():
    held = memory.layer_bytes(attention(), **HALVES, axis=POSITIONS)
    assert (held.weights, held.trained) == (40, 40)
    assert held.saved == pytest.approx(2 * 100 / 2)
    assert held.workspace == pytest.approx(2 * 30 / 2 + 40)


def test_parts_of_a_sequence_have_gradients_of_all_weights():
    each = config(num_replicas=2, num_shards=2, shard_axis=POSITIONS)
    replicas, update = step_time.update_times(staged(workload(2), each, (2,)))
    assert replicas == pytest.approx(2 * (4 * 20 / 2 / 5 + 0.25))
    assert update == pytest.approx(4 * 20 * 7 / 10)


def test_experts_get_the_tokens_that_take_any_of_them():
    mixture = layer(num_reductions=1, routing=(4, 2))
    seconds = UNITS.exchange_seconds(mixture, **HALVES, device=TOY)
    # Of the six pairs of experts one is on the first device alone.
    reduced = 2 * (10 / 2 / 5 + 1 / 4)
    assert seconds.forward == pytest.approx(reduced + 2 * (5 / 6 * 10 / 5 + 1 / 4))
    assert seconds.backward == seconds.forward


def test_both_axes_are_tried():
    found = [
        (each.shard_axis, each.num_shards)
        for each in enumerate_configs(
            num_devices=8, batch_size=8, max_stages=1, max_shards=2, max_parts=4
        )
    ]
    expected = {(UNITS, 1), (UNITS, 2), (POSITIONS, 2), (POSITIONS, 4)}
    assert {*found} == expected
    assert "T=4 positions" in str(config(num_shards=4, shard_axis=POSITIONS))
    assert "T=1 M" in str(config(shard_axis="positions"))
    assert config(shard_axis="positions").shard_axis == POSITIONS
    with pytest.raises(
        ValueError, match="`shard_axis` must be one of 'units', 'positions'"
    ):
        config(shard_axis="heads")
