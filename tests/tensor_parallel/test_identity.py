"""Sharded layers against Keras' own: outputs, masks, and every gradient."""

from __future__ import annotations

import pytest

from tests.helpers.marks import nightly
from tests.tensor_parallel import identity
from tests.tensor_parallel.models import CASES


@pytest.mark.parametrize(
    ("case", "T", "ways", "unknown_sizes"),
    nightly(
        [
            *((*each, False) for each in identity.GRID),
            *((case, 2, "both_ways", True) for case in CASES),
        ],
        gate=[
            ("columns_and_rows", 3, "both_ways", False),
            ("all_in_parts", 4, "ring", False),
            ("mlp", 2, "both_ways", True),
            ("attention", 3, "sync", False),
            ("classifier", 4, "sync", True),
            ("language_model", 3, "ring", False),
        ],
    ),
)
def test_outputs_and_gradients_are_those_without_shards(
    floatx, case, T, ways, unknown_sizes
):
    floatx("float64")
    identity.assert_equal(case, T, ways, unknown_sizes=unknown_sizes)


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_in_single_precision_they_are_those_without_shards(case):
    identity.assert_equal(case, 4, "ring", dtype="float32")


@pytest.mark.parametrize(
    ("case", "policy", "ways"),
    nightly(
        identity.HALF_GRID,
        gate=[
            ("mlp", "mixed_float16", "both_ways"),
            ("language_model", "mixed_bfloat16", "both_ways"),
        ],
    ),
)
def test_in_half_precision_they_are_nearly_those_without_shards(case, policy, ways):
    identity.assert_equal_in_half_precision(case, policy, ways)


@pytest.mark.parametrize("case", ["all_in_parts", *nightly(["language_model"])])
def test_eager_outputs_and_gradients_are_those_without_shards(floatx, case):
    floatx("float64")
    identity.assert_equal(case, 3, "ring", graph=False)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", nightly(CASES, gate=["mlp", "attention", "language_model"])
)
def test_a_seed_draws_the_same_weights(case):
    identity.assert_equal_weights_of_a_seed(case)
