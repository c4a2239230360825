"""`tests/models/test_pipelined_placement.py` in full: each schedule."""

from __future__ import annotations

import pytest

from tests.helpers import zoo
from tests.helpers.zoo import floats
from tests.models import test_pipelined_placement as short
from tests.models.test_pipelined_model import NUM_ROWS, assert_fits_the_same


def test_replicas_are_one_that_has_all_rows():
    short.test_replicas_are_one_that_has_all_rows("1f1b")


def test_replicas_of_several_losses_that_leave_things_out():
    compiled = {"loss": ["mse"] * 4, "loss_weights": [1.0, 0.5, 2.0, 1.0]}
    models = short.plain_and_replicated(zoo.masked_outputs, **compiled)
    x = zoo.ZOO["masked_outputs"].data(NUM_ROWS)
    shapes = (6, 3), (4, 3), (3,), (4, 2)
    y = [floats(NUM_ROWS, *shape) for shape in shapes]
    assert_fits_the_same(models, x, y, batch_size=8)


def test_a_pipeline_of_a_trained_model_goes_on_as_that_would():
    short.test_a_pipeline_of_a_trained_model_goes_on_as_that_would("1f1b")


PLANS = pytest.mark.parametrize("name", short.PLANS)


@pytest.mark.parametrize("eagerly", [False, True])
@PLANS
def test_each_device_runs_the_schedules_actions_in_order_and_once(name, eagerly):
    short.test_each_device_runs_the_schedules_actions_in_order_and_once(name, eagerly)


@PLANS
def test_programs_are_on_their_devices_chained_in_the_schedules_order(name):
    short.test_programs_are_on_their_devices_chained_in_the_schedules_order(name)


@PLANS
def test_only_boundaries_and_scalars_cross_between_devices(name):
    short.test_only_boundaries_and_scalars_cross_between_devices(name)
