"""Sharded layers against Keras' own: outputs, masks, and every gradient.

Each case once; all of them in tests/nightly/test_tensor_parallel.py.
"""

from __future__ import annotations

import pytest

from tests.tensor_parallel import identity


@pytest.mark.parametrize(
    ("case", "T", "ways", "unknown_sizes"),
    [
        ("columns_and_rows", 3, "both_ways", False),
        ("all_in_parts", 4, "ring", False),
        ("mlp", 2, "both_ways", True),
        ("attention", 3, "sync", False),
        ("classifier", 4, "sync", True),
        ("language_model", 3, "ring", False),
    ],
)
def test_outputs_and_gradients_are_those_without_shards(
    floatx, case, T, ways, unknown_sizes
):
    floatx("float64")
    identity.assert_equal(case, T, ways, unknown_sizes=unknown_sizes)


@pytest.mark.parametrize(
    ("case", "policy", "ways"),
    [
        ("mlp", "mixed_float16", "both_ways"),
        ("language_model", "mixed_bfloat16", "both_ways"),
    ],
)
def test_half_precision(case, policy, ways):
    identity.assert_equal_in_half_precision(case, policy, ways)


def test_eagerly(floatx):
    floatx("float64")
    identity.assert_equal("all_in_parts", 3, "ring", graph=False)


@pytest.mark.parametrize("case", ["mlp", "attention", "language_model"])
def test_a_seed_draws_the_same_weights(case):
    identity.assert_equal_weights_of_a_seed(case)
