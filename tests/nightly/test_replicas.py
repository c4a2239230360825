"""`tests/distribution/test_stage_collectives.py` with three replicas."""

from __future__ import annotations

import pytest

from tests.distribution import test_stage_collectives as short

CASES = [
    # Rows of each replica, M, remat, batch_norm; every one of each at least once.
    ((6, 6), 1, "stage", "microbatch"),
    ((6, 6), 3, "layer", "deferred"),
    ((7, 4), 3, "none", "deferred"),
    ((5, 5), 2, "except_last", "microbatch"),
    ((4, 0), 3, "layer", "microbatch"),
    ((4, 0), 2, "none", "microbatch"),
    ((3, 2, 4), 2, "stage", "deferred"),
]


@pytest.mark.parametrize(("sizes", "num_microbatches", "remat", "batch_norm"), CASES)
def test_microbatches_are_normalised_over_replicas(
    floatx, sizes, num_microbatches, remat, batch_norm
):
    floatx("float64")
    short.test_microbatches_are_normalised_over_replicas(
        sizes, num_microbatches, remat, batch_norm
    )
