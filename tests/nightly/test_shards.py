"""`tests/devices/test_sharding.py` in full: each schedule and remat."""

from __future__ import annotations

import pytest

from tests.devices import test_sharding as short
from tests.helpers.layer_stacks import REMAT_MODES
from tfgpipe import schedules


@pytest.mark.parametrize(
    ("schedule", "num_shards"),
    [*((name, 2) for name in schedules.NAMES[:4]), ("1f1b", 3)],
)
def test_weights_and_slots_after_steps_of_adam(schedule, num_shards, floatx):
    short.test_weights_and_slots_after_steps_of_adam(schedule, num_shards, floatx)


def test_replicas_of_stages_in_shards(floatx):
    short.test_replicas_of_stages_in_shards(owns_loss=False, floatx=floatx)


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize(
    ("num_microbatches", "policy"),
    [(1, "float32"), (3, "float32"), (3, "mixed_float16")],
)
def test_no_weight_goes_from_device_to_device(
    num_microbatches, policy, remat, mixed_precision
):
    short.test_no_weight_goes_from_device_to_device(
        num_microbatches, policy, remat, mixed_precision
    )
