"""Keras models as workloads, beside layers_per_stage by hand."""

from __future__ import annotations

import keras
import pytest

from tfgpipe import planner
from tfgpipe.planner import models
from tfgpipe_trainer.config import Optimizer

layers = keras.layers


def test_a_dense_layer_is_counted():
    def model():
        return keras.Sequential([keras.Input((5, 8)), layers.Dense(4), layers.ReLU()])

    dense, relu = planner.read(model).layers
    assert (dense.weights.count, relu.weights.count) == (8 * 4 + 4, 0)
    # Products and the addition of the bias.
    assert dense.flops.forward == 5 * (2 * 8 * 4 + 4)
    assert dense.positions == 5
    assert (dense.tensors.boundary, dense.tensors.outputs) == (4 * 5 * 8, 4 * 5 * 4)
    # ReLU reads and writes 20 numbers; its gradient reads two tensors, writes one.
    assert relu.traffic.forward == 2 * 4 * 20
    assert relu.traffic.backward == 3 * 4 * 20


def test_a_model_of_any_size_has_no_weights():
    def model():
        return keras.Sequential([keras.Input((2**20,)), layers.Dense(2**20)])

    # Four tebibytes.
    assert planner.read(model, name="large").parameters == 2**40 + 2**20


def test_what_crosses_a_cut_counts_skips():
    x = keras.Input((8,))
    y = layers.Dense(4)(x)
    z = layers.Dense(2)(y)
    model = keras.Model(x, layers.Concatenate()([y, z]))
    found = [layer.tensors.boundary for layer in planner.read(model).layers]
    assert found == [4 * 8, 4 * 4, 4 * (4 + 2)]


def test_an_output_that_nobody_reads_takes_nothing():
    """As the attention bias of T5's last block."""

    class Pair(layers.Layer):
        def call(self, x):
            return keras.ops.mean(x), x * 2.0

    x = keras.Input((8,))
    _, y = Pair()(x)
    pair, _ = planner.read(keras.Model(x, layers.Dense(4)(y))).layers
    assert pair.tensors.outputs == 4 * 8


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("bfloat16", 2)])
def test_weights_count_in_the_type_they_are_stored_in(dtype, size):
    def model():
        frozen = layers.Dense(8, dtype=dtype, trainable=False)
        trained = layers.Dense(4, dtype=dtype)
        return keras.Sequential([keras.Input((8,), dtype=dtype), frozen, trained])

    frozen, trained = planner.read(model).layers
    assert (frozen.weights.trained, frozen.weights.size) == (0, size)
    assert (trained.weights.trained, trained.weights.size) == (8 * 4 + 4, size)


def test_a_model_of_operations_only_has_no_weights():
    x = keras.Input((8,))
    workload = planner.read(keras.Model(x, keras.ops.relu(x + 1.0)))
    assert (workload.parameters, workload.dtype) == (0, "float32")


def test_layers_compute_in_their_dtype():
    def model():
        return keras.Sequential(
            [keras.Input((8,)), layers.Dense(4, dtype="mixed_bfloat16")]
        )

    workload = planner.read(model)
    assert workload.dtype == "bfloat16"
    assert workload.layers[0].tensors.outputs == 2 * 4


def test_blocks_that_can_be_sharded_are_known():
    from tfgpipe_params.lm.transformer import Block

    def model():
        block = Block(width=8, num_heads=2, mlp_width=16)
        return keras.Sequential([keras.Input((4, 8)), block, layers.Dense(2)])

    block, dense = planner.read(model).layers
    assert (block.max_shards, dense.max_shards) == (2, 1)
    assert block.tensors.replicated == 5 * 4 * 4 * 8


def test_parts_of_sequences_and_experts_are_known():
    from tfgpipe.layers import (
        TPMixtureOfExperts,
        TPPositionwise,
        TPSequenceAttention,
    )

    def model():
        x = keras.Input((4, 8))
        y = TPSequenceAttention(4, key_dim=2, num_key_value_heads=2, num_shards=1)(x, x)
        y = TPPositionwise([layers.Dense(8)], num_shards=1)(y)
        experts = TPMixtureOfExperts(6, hidden_units=8, top_k=2, num_shards=1)
        return keras.Model(x, experts(y))

    attention, dense, experts = planner.read(model).layers
    assert (attention.max_shards, attention.max_parts) == (1, 16)
    # Of 4 positions 2 heads of 2 keys and 2 values, of 4 bytes.
    assert attention.keys_values == 4 * 2 * (2 + 2) * 4
    assert (dense.max_shards, dense.max_parts, dense.keys_values) == (1, 16, 0)
    assert (experts.max_shards, experts.max_parts) == (6, 1)
    assert (experts.routing, experts.num_reductions) == ((6, 2), 0)


def test_the_formula_of_a_transformer_is_near_the_traced_one():
    from tfgpipe_params.lm.sizes import Transformer

    sizes = Transformer(num_layers=1, width=64, num_heads=4, mlp_width=256, context=32)

    def model():
        from tfgpipe_params.lm import transformer

        return transformer.decoder_only(sizes)

    traced = planner.read(model)
    formula = planner.transformer(
        name="formula",
        num_layers=1,
        width=64,
        mlp_width=256,
        num_heads=4,
        length=32,
        vocabulary=256,
    )
    block, by_formula = traced.layers[2], formula.layers[1]
    assert block.weights.count == by_formula.weights.count
    assert block.flops.forward == pytest.approx(by_formula.flops.forward, rel=0.1)
    assert block.flops.backward == pytest.approx(by_formula.flops.backward, rel=0.1)
    # Keras' gelu keeps more than its input.
    assert 1 < block.tensors.saved / by_formula.tensors.saved < 2


def test_unknown_sizes_are_refused():
    model = keras.Sequential([keras.Input((None, 8)), layers.Dense(4)])
    with pytest.raises(ValueError, match="depends on all sizes but that of the batch"):
        planner.read(model)


def test_a_model_without_inputs_is_refused():
    with pytest.raises(ValueError, match="needs the shapes of a model's inputs"):
        planner.read(keras.Sequential([layers.Dense(4)]))


def test_a_keras_model_is_searched():
    model = keras.Sequential([keras.Input((8,)), *(layers.Dense(8) for _ in range(4))])
    result = planner.search(model, device="cpu-core", num_devices=2, batch_size=8)
    assert result.best[0].config.total_devices == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"name": "adamw"}, 2),
        ({"name": "lion"}, 1),
        ({"name": "sgd"}, 1),
        ({"name": "sgd", "beta_1": 0.0}, 0),
        ({"name": "adamw", "ema_decay": 0.99}, 3),
        ({"name": "adamw", "gradient_accumulation_steps": 4}, 3),
        ({"name": "lion", "ema_decay": 0.99, "gradient_accumulation_steps": 4}, 3),
        # Beside the whole ones rows and columns, of a bias a number each.
        ({"name": "adafactor"}, 1 + (30 + 20 + 2) / (30 * 20 + 20)),
    ],
)
def test_slots_are_counted_as_the_optimizer_makes_them(arguments, expected):
    with models.without_weights():
        model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(20)])
    found = models.num_slots(lambda: Optimizer(**arguments).build(100), model)
    assert found == pytest.approx(expected)
