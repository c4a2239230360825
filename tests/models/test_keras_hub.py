"""Models of keras-hub train in a pipeline as they do without one.

Those of other families do in `tests/nightly/test_keras_hub.py`, and
`python -m benchmarks.keras_hub` has the table of all.
"""

from __future__ import annotations

import pytest

from benchmarks.keras_hub import FAMILIES, compare

# Worst differences are some roundings. Families that compute in float32 in part,
# whatever they are asked, are exact to its roundings.
DOUBLE, SINGLE = 1e-10, 1e-5

EXACT = {"bert": DOUBLE, "vgg": DOUBLE}


@pytest.mark.parametrize("family", EXACT)
def test_a_family_of_independent_examples_is_exact(family):
    """Broken configurations and wrong shapes notwithstanding."""
    assert_exact(family, EXACT[family])


def assert_exact(family, tolerance):
    assert FAMILIES[family].exact
    result = compare(FAMILIES[family])
    assert max(result.gradients, result.microbatch_gradients) < tolerance
    assert result.outputs < tolerance
    assert not result.warnings


def test_the_balance_of_experts_is_named_and_that_of_microbatches_exact():
    assert_balance_is_named("mixtral")


def assert_balance_is_named(family):
    result = compare(FAMILIES[family])
    (warning,) = result.warnings
    assert "'transformer_layer_0' adds a loss that is no mean" in warning
    assert result.microbatch_gradients < SINGLE < result.gradients


def test_masks_joined_with_the_batch_are_refused():
    words = r"keep the batch dimension.*Layer 'sam_prompt_encoder' maps shape"
    with pytest.raises(ValueError, match=words):
        compare(FAMILIES["sam"])
