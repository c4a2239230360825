"""`tests/runtime/test_state.py` for each stack with each choice of recomputation."""

from __future__ import annotations

import pytest

from tests.helpers.layer_stacks import REMAT_MODES
from tests.runtime import test_state as short


@pytest.mark.parametrize(
    ("name", "remat", "rows", "num_microbatches"),
    [
        (name, remat, *((8, 4), (7, 3), (5, 8))[(i + j) % 3])
        for i, name in enumerate(["dropped", "normalised", "regularised"])
        for j, remat in enumerate(REMAT_MODES)
    ],
)
def test_state_advances_as_when_microbatches_come_one_by_one(
    name, rows, num_microbatches, remat
):
    short.test_state_advances_as_when_microbatches_come_one_by_one(
        name, rows, num_microbatches, remat
    )


@pytest.mark.parametrize("remat", ["layer", "none"])
def test_an_unknown_batch_size_leaves_the_same_state(remat):
    short.test_an_unknown_batch_size_leaves_the_same_state(remat)
