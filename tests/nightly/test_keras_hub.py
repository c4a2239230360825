"""More families of keras-hub, and what is said of those that cannot be exact."""

from __future__ import annotations

import pytest

from benchmarks.studies.keras_hub import FAMILIES, compare
from tests.models.test_keras_hub import (
    CAUSAL,
    DOUBLE,
    SINGLE,
    assert_balance_is_exact,
    assert_exact,
    assert_tokens,
)

EXACT = {
    "deit": DOUBLE,
    "distil_bert": DOUBLE,
    "f_net": DOUBLE,
    "llama": SINGLE,
    "mmdit": DOUBLE,
    "swin": DOUBLE,
    "t5": DOUBLE,
}


@pytest.mark.parametrize("family", EXACT)
def test_a_family_of_independent_examples_is_exact(family):
    assert_exact(family, EXACT[family])


def test_rwkv7_is_exact():
    """Its recurrence is a Python loop."""
    result = compare(FAMILIES["rwkv7"])
    assert result.gradients < SINGLE
    assert not result.warnings


def test_the_balance_of_experts_is_that_of_the_mini_batch():
    assert_balance_is_exact("qwen_moe")


def test_embeddings_that_depend_on_the_batch_size_are_named():
    """XLNet reshapes positions and batch where it should transpose them."""
    result = compare(FAMILIES["xlnet"])
    named = "Layer 'content_query_embedding' mixes the examples of a batch"
    assert any(named in warning for warning in result.warnings)
    assert result.microbatch_gradients < DOUBLE < result.gradients


def test_images_by_texts_are_refused():
    words = r"Layer 'clip_head' makes another axis as long as the batch.*\(6, 6\)"
    with pytest.raises(ValueError, match=words):
        compare(FAMILIES["clip"])


@pytest.mark.parametrize("name", sorted({*CAUSAL} - {"GPT2", "Llama"}))
def test_tokens_are_those_of_keras_hub(name):
    assert_tokens(name)
