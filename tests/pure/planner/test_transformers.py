"""Sizes of a transformer, as a workload."""

from __future__ import annotations

import pytest

from benchmarks.llama_plans import workload
from tfgpipe.planner.transformers import transformer

SIZES = {
    "name": "lm",
    "num_layers": 2,
    "width": 64,
    "mlp_width": 256,
    "num_heads": 4,
    "length": 16,
    "vocabulary": 100,
}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_layers": 0}, "`num_layers` must be an integer of at least 1"),
        ({"num_heads": 5}, "must divide `width`. Received num_heads=5 and width=64"),
        (
            {"num_key_value_heads": 3},
            "must divide `num_heads`. Received num_key_value_heads=3 and num_heads=4",
        ),
        ({"num_key_value_heads": 0}, "`num_key_value_heads` must be an integer"),
        ({"dtype": "float99"}, "`dtype` must be one of 'float32', .* 'float99'"),
    ],
)
def test_sizes_that_no_transformer_has_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        transformer(**{**SIZES, **wrong})


@pytest.mark.parametrize(
    ("name", "billions"), [("8B", 8.03), ("70B", 70.55), ("405B", 405.85)]
)
def test_parameters_are_those_of_llama(name, billions):
    """As counted in the published checkpoints."""
    count = sum(layer.weights.count for layer in workload(name).layers)
    assert count / 1e9 == pytest.approx(billions, rel=1e-3)


def test_flops_are_those_that_training_is_measured_by():
    """6 for each weight of a matrix, and 12 n w for attention, a token."""
    model = workload("70B", flash=False)
    flops = sum(layer.flops.forward + layer.flops.backward for layer in model.layers)
    embedding = 128_256 * 8192
    weights = sum(layer.weights.count for layer in model.layers) - embedding
    expected = 6 * weights + 12 * 80 * 8192 * 8192
    assert flops / 8192 == pytest.approx(expected, rel=1e-3)


def test_grouped_queries_save_two_tensors_of_a_narrower_width():
    block, plain = (
        workload("70B", num_key_value_heads=heads).layers[1] for heads in (8, 64)
    )
    narrower = 2 * 8192 * (8192 - 8 * 128) * 2
    assert plain.tensors.saved - block.tensors.saved == narrower
    assert (block.max_shards, plain.max_shards) == (8, 64)


def test_flash_attention_saves_no_scores_and_computes_them_again():
    block, plain = (workload("8B", flash=flash).layers[1] for flash in (True, False))
    scores = 32 * 8192 * 8192 * 2
    assert plain.tensors.saved - block.tensors.saved == 2 * scores
    assert plain.tensors.kept - block.tensors.kept == scores
    again = block.flops.backward - plain.flops.backward
    assert again == 2 * 8192 * 8192 * 4096


@pytest.mark.parametrize(
    ("layers", "width", "mlp", "heads", "vocabulary", "total", "active"),
    [
        (32, 4096, 14336, 32, 32000, 46.70, 12.88),
        (56, 6144, 16384, 48, 32768, 140.63, 39.15),
    ],
    ids=["8x7B", "8x22B"],
)
def test_parameters_are_those_of_mixtral(
    layers, width, mlp, heads, vocabulary, total, active
):
    """As counted in the checkpoints; active are those that a token passes."""

    def parameters(num_experts):
        return transformer(
            name="mixtral",
            num_layers=layers,
            width=width,
            mlp_width=mlp,
            num_heads=heads,
            num_key_value_heads=8,
            length=4096,
            vocabulary=vocabulary,
            gated=True,
            num_experts=num_experts,
            top_k=2,
        ).parameters

    assert parameters(8) == pytest.approx(total * 1e9, rel=1e-3)
    assert parameters(2) == pytest.approx(active * 1e9, rel=1e-3)


def test_flops_of_experts_are_of_those_that_a_token_takes():
    sizes = {"num_layers": 1, "width": 64, "mlp_width": 256, "num_heads": 4}
    common = {**sizes, "name": "x", "length": 32, "vocabulary": 8, "gated": True}
    dense = transformer(**common).layers[1]
    mixed = transformer(**common, num_experts=6, top_k=3).layers[1]
    per_expert = 2 * 32 * 3 * 64 * 256
    router = 2 * 32 * 64 * 6
    assert mixed.flops.forward - dense.flops.forward == 2 * per_expert + router
    assert mixed.max_shards == 2  # Divides the heads, and the experts.


def test_fewer_experts_than_a_token_takes_are_refused():
    sizes = {"num_layers": 1, "width": 64, "mlp_width": 256, "num_heads": 4}
    with pytest.raises(ValueError, match="num_experts=2 and top_k=3"):
        transformer(**sizes, name="x", length=32, vocabulary=8, num_experts=2, top_k=3)
