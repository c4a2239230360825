"""`tests/stage/test_accumulation.py` for each schedule and remat."""

from __future__ import annotations

import pytest

from tests.stage import test_accumulation as short


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("remat", ["none", "stage"])
def test_a_step_has_one_product_for_the_gradients_of_all_microbatches(schedule, remat):
    short.test_a_step_has_one_product_for_the_gradients_of_all_microbatches(
        schedule, remat
    )
