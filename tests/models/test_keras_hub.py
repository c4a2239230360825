"""Models of keras-hub train in a pipeline as they do without one.

`python -m benchmarks.studies.keras_hub` has the table of all families.
"""

from __future__ import annotations

import keras
import keras_hub
import numpy as np
import pytest

import tfgpipe
from benchmarks.studies.keras_hub import FAMILIES, compare
from tests.helpers.marks import nightly

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


@pytest.mark.parametrize("family", nightly(EXACT, gate=["bert", "vgg"]))
def test_a_family_of_independent_examples_is_exact(family):
    """Broken configurations and wrong shapes notwithstanding."""
    tolerance = EXACT[family]
    assert FAMILIES[family].exact
    result = compare(FAMILIES[family])
    assert max(result.gradients, result.microbatch_gradients) < tolerance
    assert result.outputs < tolerance
    assert not result.warnings


@pytest.mark.nightly
def test_rwkv7_is_exact():
    """Its recurrence is a Python loop."""
    result = compare(FAMILIES["rwkv7"])
    assert result.gradients < SINGLE
    assert not result.warnings


@pytest.mark.parametrize("family", ["mixtral", *nightly(["qwen_moe"])])
def test_the_balance_of_experts_is_that_of_the_mini_batch(family):
    """That of microbatches, one by one, would be another."""
    assert FAMILIES[family].exact
    result = compare(FAMILIES[family])
    assert max(result.gradients, result.outputs) < SINGLE < result.microbatch_gradients
    assert not result.warnings


def test_masks_joined_with_the_batch_are_refused():
    words = r"keep the batch dimension.*Layer 'sam_prompt_encoder' maps shape"
    with pytest.raises(ValueError, match=words):
        compare(FAMILIES["sam"])


@pytest.mark.nightly
def test_embeddings_that_depend_on_the_batch_size_are_named():
    """XLNet reshapes positions and batch where it should transpose them."""
    result = compare(FAMILIES["xlnet"])
    named = "Layer 'content_query_embedding' mixes the examples of a batch"
    assert any(named in warning for warning in result.warnings)
    assert result.microbatch_gradients < DOUBLE < result.gradients


@pytest.mark.nightly
def test_images_by_texts_are_refused():
    words = r"Layer 'clip_head' makes another axis as long as the batch.*\(6, 6\)"
    with pytest.raises(ValueError, match=words):
        compare(FAMILIES["clip"])


# Sizes of small causal models, by the names that families have for them.
_SMALL = {"vocabulary_size": 23, "num_layers": 3, "intermediate_dim": 12}
_HEADS = {**_SMALL, "num_heads": 2, "hidden_dim": 8}
_GROUPED = {
    **_SMALL,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 16,
}
_EXPERTS = {**_GROUPED, "num_experts": 4, "top_k": 2}
CAUSAL = {
    "Bloom": {**_HEADS, "max_sequence_length": 16},
    "Falcon": {**_SMALL, "num_attention_heads": 2, "hidden_dim": 8},
    "GPT2": {**_HEADS, "max_sequence_length": 16},
    "Gemma": {**_GROUPED, "head_dim": 4},
    "GptOss": {**_EXPERTS, "sliding_window": 4, "head_dim": 4},
    "Llama": _GROUPED,
    "Llama3": _GROUPED,
    "Mistral": {**_GROUPED, "sliding_window": 4},
    "Mixtral": _EXPERTS,
    "OPT": {**_HEADS, "max_sequence_length": 16},
    "Phi3": _GROUPED,
    "Qwen": _GROUPED,
    "Qwen3": {**_GROUPED, "head_dim": 4},
    "Qwen3Moe": {
        **_EXPERTS,
        "moe_intermediate_dim": 8,
        "head_dim": 4,
        "norm_top_k_prob": True,
        "decoder_sparse_step": 1,
    },
}


def causal_model(name, **arguments):
    """Returns a small causal model, whose weights make many tokens likely."""
    keras.utils.set_random_seed(0)
    backbone = getattr(keras_hub.models, f"{name}Backbone")(**CAUSAL[name])
    model = getattr(keras_hub.models, f"{name}CausalLM")
    model = model(backbone=backbone, **arguments)
    random = np.random.default_rng(0)
    for weight in model.trainable_weights:
        if len(weight.shape) > 1:
            values = random.normal(size=weight.shape) / np.sqrt(weight.shape[0])
            weight.assign(values)
    return model


@pytest.mark.nightly
@pytest.mark.parametrize("name", nightly(sorted(CAUSAL), gate=["GPT2", "Llama"]))
def test_tokens_are_those_of_keras_hub(name):
    """The likeliest ones, and drawn ones."""
    model, random = causal_model(name, preprocessor=None), np.random.default_rng(0)
    sizes = np.array([2, 5, 3, 4])
    given = np.arange(12) < sizes[:, None]
    tokens = np.where(given, random.integers(1, 23, given.shape), 0)
    expected = []

    def samplers():
        return "greedy", keras_hub.samplers.TopKSampler(k=5, seed=3)

    for sampler in samplers():
        model.compile(sampler=sampler, jit_compile=False)
        inputs = {"token_ids": tokens.copy(), "padding_mask": given.copy()}
        expected.append(model.generate(inputs, stop_token_ids=None)["token_ids"])
    assert len(np.unique(expected[1][:, 5:])) > 5
    model = tfgpipe.pipeline(model, num_stages=3, num_microbatches=1)
    prompts = [row[:size] for row, size in zip(tokens, sizes, strict=True)]
    for sampler, each in zip(samplers(), expected, strict=True):
        actual = model.generate(
            prompts, max_length=12, sampler=sampler, num_microbatches=2
        )
        np.testing.assert_array_equal(actual, each)


def test_beam_search_is_refused():
    model = causal_model("GPT2", preprocessor=None)
    model = tfgpipe.pipeline(model, num_stages=1, num_microbatches=1)
    beam = keras_hub.samplers.BeamSampler(num_beams=2)
    with pytest.raises(ValueError, match="which beam and contrastive search do not"):
        model.generate([[1, 2]], max_length=6, sampler=beam)


def test_texts_go_through_a_preprocessor():
    words = [*"abcdefghijklmnopqrstu", "ab", "<|endoftext|>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = keras_hub.tokenizers.GPT2Tokenizer(vocabulary, merges=["a b"])
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(
        tokenizer, sequence_length=12
    )
    model = causal_model("GPT2", preprocessor=preprocessor)
    model.compile(sampler="greedy", jit_compile=False)
    texts = ["abc", "de"]
    expected = model.generate(texts)
    model = tfgpipe.pipeline(model, num_stages=3, num_microbatches=1)
    assert model.generate(texts, preprocessor=preprocessor) == expected
    short = model.generate(texts, preprocessor=preprocessor, max_length=6)
    assert [len(text) <= 6 for text in short] == [True, True]
