"""Sizes of a transformer, as a workload."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.studies.llama_plans import workload
from tests.helpers.planner_toys import config
from tfgpipe.planner import TABLE, Link, PlanRequest
from tfgpipe.planner.shard_axes import UNITS
from tfgpipe.planner.transformers import transformer

pytestmark = pytest.mark.pure

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
        ({"weight_dtype": "int8"}, "`weight_dtype` must be one of .* 'int8'"),
        ({"loss_dtype": "int8"}, "`loss_dtype` must be one of .* 'int8'"),
        ({"head_width": 0}, "`head_width` must be an integer of at least 1"),
        ({"lora_rank": -1}, "`lora_rank` must be an integer of at least 0"),
        ({"num_frozen_layers": 3}, "Received num_frozen_layers=3 and num_layers=2"),
        ({"num_frozen_layers": 1, "lora_rank": 2}, "lora_rank=2, num_frozen_layers=1"),
        ({"num_experts": 2, "lora_rank": 2}, "lora_rank=2, .* num_experts=2"),
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


def test_heads_of_a_width_of_their_own_widen_queries_and_contexts():
    """Four heads of 32 where the width is 64: twice as wide."""
    wide, plain = (
        transformer(**SIZES, flash=True, **other).layers[1]
        for other in ({"head_width": 32}, {})
    )
    more = 4 * 64 * 64  # Of four matrices.
    assert wide.weights.count - plain.weights.count == more + 3 * 64
    assert wide.flops.forward - plain.flops.forward == 2 * 16 * more + 4 * 16**2 * 64
    # Queries, keys, values, contexts.
    assert wide.tensors.saved - plain.tensors.saved == 4 * 16 * 4 * 64
    odd = transformer(**{**SIZES, "num_heads": 5}, head_width=16)
    assert odd.layers[1].max_shards == 5


def state_bytes(model, num_slots=2):
    """Returns the bytes of weights and copies, of gradients, and of slots."""
    held = PlanRequest(
        model,
        device=TABLE["h100-80g"],
        num_devices=1,
        batch_size=1,
        num_slots=num_slots,
    ).estimate(config())
    memory = held.fullest
    return memory.weights, memory.gradients, memory.slots


def test_half_precision_everywhere_is_two_bytes_of_each():
    mixed = transformer(**SIZES, dtype="bfloat16")
    half = transformer(**SIZES, dtype="bfloat16", weight_dtype="bfloat16")
    N = mixed.parameters
    assert half.parameters == N
    assert state_bytes(mixed) == pytest.approx((6 * N, 4 * N, 8 * N))
    assert state_bytes(half) == pytest.approx((2 * N, 2 * N, 4 * N))
    # A copy in float32 and two moments, as slots.
    assert sum(state_bytes(half, 6)) == pytest.approx(16 * N)


def test_a_loss_of_float32_holds_logits_and_their_gradients_in_it():
    half, loss = (
        transformer(**SIZES, dtype="bfloat16", loss_dtype=dtype).layers[-1].tensors
        for dtype in (None, "float32")
    )
    logits = 16 * 100
    assert loss.saved - half.saved == (4 - 2) * logits
    # The gradient in float32, and cast for the products.
    assert (half.workspace, loss.workspace) == (2 * logits, (4 + 2) * logits)
    whole = transformer(**SIZES, loss_dtype="float32").layers[-1].tensors
    assert whole.workspace == 4 * logits


def test_a_tied_softmax_has_no_weights_and_computes_as_much():
    tied, plain = (transformer(**SIZES, tied=tied) for tied in (True, False))
    assert plain.parameters - tied.parameters == 100 * 64
    assert tied.layers[-1].flops == plain.layers[-1].flops
    assert tied.layers[0] == plain.layers[0]


def test_frozen_blocks_pass_gradients_on_and_have_none():
    """The first block and the embedding; the second block is as it was."""
    frozen, plain = (transformer(**SIZES, num_frozen_layers=n) for n in (1, 0))
    embedding, block = frozen.layers[:2]
    assert embedding.weights.trained_bytes == block.weights.trained_bytes == 0
    assert block.weights.count == plain.layers[1].weights.count
    # Four of width by width, and two of the perceptron.
    matrices = 4 * 64 * 64 + 2 * 64 * 256
    saved = plain.layers[1].flops.backward - block.flops.backward
    assert saved == 2 * 16 * matrices
    assert frozen.layers[2:] == plain.layers[2:]
    trained = plain.parameters - 100 * 64 - block.weights.count
    assert state_bytes(frozen)[1:] == pytest.approx((4 * trained, 8 * trained))


def test_a_tied_softmax_is_frozen_with_the_embedding():
    tied = transformer(**SIZES, num_frozen_layers=1, tied=True).layers[-1]
    own = transformer(**SIZES, num_frozen_layers=1).layers[-1]
    assert tied.flops.backward == tied.flops.forward == own.flops.backward / 2


def test_adapters_alone_are_trained():
    """Of rank 2, at four matrices of 64 by 64, and two of 64 by 256."""
    adapters = 2 * (4 * (64 + 64) + 2 * (64 + 256))
    model, plain = (transformer(**SIZES, lora_rank=rank) for rank in (2, 0))
    assert model.parameters - plain.parameters == 2 * adapters
    assert state_bytes(model)[1] == 4 * 2 * adapters
    block, other = model.layers[1], plain.layers[1]
    assert block.flops.forward - other.flops.forward == 2 * 16 * adapters
    matrices = 4 * 64 * 64 + 2 * 64 * 256
    less = 2 * 16 * matrices - 4 * 16 * adapters
    assert other.flops.backward - block.flops.backward == less
    softmax = model.layers[-1].flops
    assert softmax.backward == softmax.forward == 2 * 16 * 64 * 100


def test_a_step_with_adapters_takes_four_flops_for_each_weight_and_token():
    """And 14 n w for scores: 4 forward, 2 again, 8 backward."""
    model = workload("70B", lora_rank=16)
    matrices = model.parameters - 128_256 * 8192
    expected = 4 * matrices + 14 * 80 * 8192 * 8192
    assert model.flops / 8192 == pytest.approx(expected, rel=0.01)


def test_shards_of_sequences_hold_no_activation_whole():
    whole, parts = (
        transformer(**SIZES, sequence_parallel=parts).layers[1].tensors
        for parts in (False, True)
    )
    assert whole.replicated == 5 * 4 * 16 * 64
    assert parts.replicated == 0
    assert parts.saved == whole.saved


def test_a_sharded_vocabulary_is_divided_with_its_products():
    """Of 102 tokens two shards have as many, where there are four heads."""
    sizes = {**SIZES, "vocabulary": 102, "num_heads": 4}
    embedding, _, _, head = transformer(**sizes, shards_vocabulary=True).layers
    assert (embedding.max_shards, head.max_shards) == (2, 2)
    exchanged = UNITS.exchange_seconds(
        embedding,
        examples=1,
        num_shards=2,
        device=dataclasses.replace(
            TABLE["h100-80g"], link=Link(bandwidth=1, latency=0)
        ),
        dtype="float32",
    )
    # The rows that are looked up, and the gradient of the softmax's inputs.
    assert exchanged.forward == exchanged.backward == 4 * 16 * 64
    assert head.num_reductions == 0
    whole = transformer(**sizes).layers
    assert (whole[0].max_shards, whole[-1].max_shards) == (1, 1)
