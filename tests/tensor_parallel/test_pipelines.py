"""Sharded layers as parts of stages, against Keras' layers."""

from __future__ import annotations

import pytest

from tests.helpers.marks import nightly
from tests.tensor_parallel import identity
from tfgpipe import schedules


@pytest.mark.parametrize(
    ("case", "remat", "ways"),
    nightly(
        identity.STAGES,
        gate=[
            ("all_in_parts", "none", "both_ways"),
            ("language_model", "layer", "ring"),
        ],
    ),
)
def test_outputs_and_gradients_are_those_without_shards(floatx, case, remat, ways):
    floatx("float64")
    identity.assert_equal_in_stages(case, remat, ways)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "schedule", nightly(schedules.NAMES[:4], gate=["1f1b", "interleaved"])
)
def test_training_is_that_without_shards(floatx, schedule):
    floatx("float64")
    identity.assert_schedule_trains_equally(schedule)
