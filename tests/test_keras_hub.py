"""Models of keras-hub train in a pipeline as they do without one.

`python -m benchmarks.keras_hub` has the table of all families.
"""

from __future__ import annotations

import pytest

from benchmarks.keras_hub import FAMILIES, compare

# Worst differences are some roundings. Families that compute in float32 in part,
# whatever they are asked, are exact to its roundings.
DOUBLE, SINGLE = 1e-10, 1e-5

EXACT = {
    "bert": DOUBLE,
    "deit": DOUBLE,
    "distil_bert": DOUBLE,
    "f_net": DOUBLE,
    "llama": SINGLE,
    "mmdit": DOUBLE,
    "swin": DOUBLE,
    "t5": DOUBLE,
    "vgg": DOUBLE,
}


@pytest.mark.parametrize("family", EXACT)
def test_a_family_of_independent_examples_is_exact(family):
    """Broken configurations and wrong shapes notwithstanding."""
    assert FAMILIES[family].exact
    result = compare(FAMILIES[family])
    assert max(result.gradients, result.microbatch_gradients) < EXACT[family]
    assert result.outputs < EXACT[family]
    assert not result.warnings


@pytest.mark.slow  # Its recurrence is a Python loop.
def test_rwkv7_is_exact():
    result = compare(FAMILIES["rwkv7"])
    assert result.gradients < SINGLE
    assert not result.warnings


@pytest.mark.parametrize("family", ["mixtral", "qwen_moe"])
def test_the_balance_of_experts_is_named_and_that_of_microbatches_exact(family):
    result = compare(FAMILIES[family])
    (warning,) = result.warnings
    assert "'transformer_layer_0' adds a loss that is no mean" in warning
    assert result.microbatch_gradients < SINGLE < result.gradients


def test_embeddings_that_depend_on_the_batch_size_are_named():
    """XLNet reshapes positions and batch where it should transpose them."""
    result = compare(FAMILIES["xlnet"])
    named = "Layer 'content_query_embedding' mixes the rows of a batch"
    assert any(named in warning for warning in result.warnings)
    assert result.microbatch_gradients < DOUBLE < result.gradients


def test_images_by_texts_are_refused():
    words = r"Layer 'clip_head' makes another axis as long as the batch.*\(6, 6\)"
    with pytest.raises(ValueError, match=words):
        compare(FAMILIES["clip"])


def test_masks_joined_with_the_batch_are_refused():
    words = r"keep the batch dimension.*Layer 'sam_prompt_encoder' maps shape"
    with pytest.raises(ValueError, match=words):
        compare(FAMILIES["sam"])
