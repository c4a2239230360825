"""`tests/stage/test_boundary.py` for every schedule and type."""

from __future__ import annotations

import pytest

from tests.stage import test_boundary as short


@pytest.mark.parametrize("transfer_dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("schedule", short.LAYOUTS)
def test_a_step_of_any_schedule_is_that_of_layers_at_the_boundaries(
    schedule, transfer_dtype, floatx
):
    short.test_a_step_of_any_schedule_is_that_of_layers_at_the_boundaries(
        schedule, transfer_dtype, floatx
    )
