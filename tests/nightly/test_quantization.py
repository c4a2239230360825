"""Quantized pipelines: every schedule and every file, of which the gate has some."""

from __future__ import annotations

import pytest

from tests.quantization import training


@pytest.mark.parametrize("name", ["dense", "custom"])
def test_eight_microbatches_recomputed_equal_one_kept(name):
    training.assert_recomputed_equals_kept(name, times=3)


@pytest.mark.parametrize(("schedule", "remat", "policy"), training.SCHEDULES)
def test_every_schedule_trains_as_the_layers_alone(schedule, remat, policy):
    training.assert_trains_as_alone(schedule, remat, policy, num_stages=4)


@pytest.mark.parametrize(("name", "policy"), training.FILES)
def test_models_are_saved_and_loaded(name, policy, tmp_path):
    training.assert_saved_and_loaded(name, policy, tmp_path)


@pytest.mark.parametrize("what", ["model", "wrapper", "layer"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_models_frozen_after_training_are_saved_and_copied(what, pipelined, tmp_path):
    training.assert_frozen_is_saved_and_copied(what, pipelined, tmp_path)
