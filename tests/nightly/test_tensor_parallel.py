"""Sharded layers: all cases, shards, ways, schedules, of which the gate has some."""

from __future__ import annotations

import itertools

import pytest

from tests.tensor_parallel import identity, placed
from tests.tensor_parallel.models import CASES, WAYS
from tfgpipe import schedules


@pytest.mark.parametrize(("case", "T", "ways"), identity.GRID)
def test_outputs_and_gradients_are_those_without_shards(floatx, case, T, ways):
    floatx("float64")
    identity.assert_equal(case, T, ways)


@pytest.mark.parametrize("case", CASES)
def test_single_precision(case):
    identity.assert_equal(case, 4, "ring", dtype="float32")


@pytest.mark.parametrize(("case", "policy", "ways"), identity.HALF_GRID)
def test_half_precision(case, policy, ways):
    identity.assert_equal_in_half_precision(case, policy, ways)


@pytest.mark.parametrize("case", ["all_in_parts", "language_model"])
def test_eagerly(floatx, case):
    floatx("float64")
    identity.assert_equal(case, 3, "ring", graph=False)


@pytest.mark.parametrize("case", CASES)
def test_batches_of_unknown_size(floatx, case):
    floatx("float64")
    identity.assert_equal(case, 2, "both_ways", unknown_sizes=True)


@pytest.mark.parametrize("case", CASES)
def test_a_seed_draws_the_same_weights(case):
    identity.assert_equal_weights_of_a_seed(case)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("case", ["columns_and_rows", "classifier"])
def test_training_is_that_without_shards(floatx, case, ways):
    floatx("float64")
    identity.assert_trains_equally(case, ways, epochs=2)


@pytest.mark.parametrize(("case", "remat", "ways"), identity.STAGES)
def test_stages_compute_what_layers_without_shards_do(floatx, case, remat, ways):
    floatx("float64")
    identity.assert_equal_in_stages(case, remat, ways)


@pytest.mark.parametrize("schedule", schedules.NAMES[:4])
def test_every_schedule_trains_as_without_shards(floatx, schedule):
    floatx("float64")
    identity.assert_schedule_trains_equally(schedule)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_work_is_split_evenly_and_what_crosses_is_copied(case, ways):
    graph = placed.traced(case, ways)
    placed.assert_work_is_split_evenly(case, graph)
    placed.assert_copies_are_operations(graph)


@pytest.mark.parametrize(
    ("case", "ways"), list(zip(CASES, itertools.cycle(WAYS), strict=False))
)
def test_in_a_stage_placeholder_devices_are_named(case, ways):
    placed.assert_placeholder_devices_are_named(case, ways)
