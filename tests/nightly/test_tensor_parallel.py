"""Sharded layers: all twins, shards, ways, schedules, of which the gate has some."""

from __future__ import annotations

import itertools

import pytest

from tests.tensor_parallel import identity, placed
from tests.tensor_parallel.models import TWINS, WAYS
from tfgpipe import schedules


@pytest.mark.parametrize(("twins", "T", "ways"), identity.GRID)
def test_outputs_and_gradients_are_those_without_shards(floatx, twins, T, ways):
    floatx("float64")
    identity.assert_equal(twins, T, ways)


@pytest.mark.parametrize("twins", TWINS)
def test_single_precision(twins):
    identity.assert_equal(twins, 4, "ring", dtype="float32")


@pytest.mark.parametrize(("twins", "policy", "ways"), identity.HALF_GRID)
def test_half_precision(twins, policy, ways):
    identity.assert_equal_in_half_precision(twins, policy, ways)


@pytest.mark.parametrize("twins", ["all_in_parts", "language_model"])
def test_eagerly(floatx, twins):
    floatx("float64")
    identity.assert_equal(twins, 3, "ring", graph=False)


@pytest.mark.parametrize("twins", TWINS)
def test_batches_of_unknown_size(floatx, twins):
    floatx("float64")
    identity.assert_equal(twins, 2, "both_ways", unknown_sizes=True)


@pytest.mark.parametrize("twins", TWINS)
def test_a_seed_draws_the_same_weights(twins):
    identity.assert_equal_weights_of_a_seed(twins)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("twins", ["columns_and_rows", "classifier"])
def test_training_is_that_without_shards(floatx, twins, ways):
    floatx("float64")
    identity.assert_trains_equally(twins, ways, epochs=2)


@pytest.mark.parametrize(("twins", "remat", "ways"), identity.STAGES)
def test_stages_compute_what_layers_without_shards_do(floatx, twins, remat, ways):
    floatx("float64")
    identity.assert_equal_in_stages(twins, remat, ways)


@pytest.mark.parametrize("schedule", schedules.NAMES)
def test_every_schedule_trains_as_without_shards(floatx, schedule):
    floatx("float64")
    identity.assert_schedule_trains_equally(schedule)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("twins", TWINS)
def test_work_is_split_evenly_and_what_crosses_is_copied(twins, ways):
    graph = placed.traced(twins, ways)
    placed.assert_work_is_split_evenly(twins, graph)
    placed.assert_copies_are_operations(graph)


@pytest.mark.parametrize(
    ("twins", "ways"), list(zip(TWINS, itertools.cycle(WAYS), strict=False))
)
def test_in_a_stage_stand_ins_are_named_and_no_device(twins, ways):
    placed.assert_stand_ins_are_named(twins, ways)
