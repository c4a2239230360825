"""`tests/partition/test_plans.py` in full: each schedule and remat."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.helpers.layer_stacks import dropped, normalised
from tests.partition import test_plans as short
from tests.partition.test_plans import without_fusion  # noqa: F401
from tfgpipe import schedules
from tfgpipe.partition import balances


@pytest.mark.parametrize("balance", ["params", "flops", "memory"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_no_other_cut_is_better(balance, num_stages):
    short.test_no_other_cut_is_better(balance, num_stages)


@pytest.mark.parametrize("schedule", schedules.NAMES[:4])
@pytest.mark.parametrize("remat", ["none", "stage"])
def test_memory_is_of_the_microbatches_that_the_schedule_has_in_flight(schedule, remat):
    short.test_memory_is_of_the_microbatches_that_the_schedule_has_in_flight(
        schedule, remat
    )


@pytest.mark.parametrize("remat", ["none", "stage", "layer", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_memory_is_balanced_by_what_the_schedule_holds(schedule, remat):
    short.test_memory_is_balanced_by_what_the_schedule_holds(schedule, remat)


def test_stages_that_share_a_device_share_its_memory():
    short.test_stages_that_share_a_device_share_its_memory("none")


@pytest.mark.parametrize("make", [dropped, normalised])
@pytest.mark.parametrize("balance", balances.NAMES)
def test_planning_changes_no_variable_and_draws_no_seed(make, balance):
    short.test_planning_changes_no_variable_and_draws_no_seed(make, balance)


@pytest.mark.usefixtures("without_fusion")
@pytest.mark.parametrize(("make", "num_replicas"), [(dropped, 2), (normalised, 1)])
def test_training_goes_on_to_the_last_bit_after_a_new_cut(make, num_replicas):
    short.train_with_new_cuts(make, num_replicas, np.testing.assert_array_equal)


def test_training_goes_on_to_rounding_after_a_new_cut_where_operations_are_fused():
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    short.train_with_new_cuts(dropped, None, close)


@pytest.mark.parametrize("balance", balances.NAMES)
def test_a_limit_that_nothing_satisfies_says_by_how_much(balance):
    short.test_a_limit_that_nothing_satisfies_says_by_how_much(balance)
