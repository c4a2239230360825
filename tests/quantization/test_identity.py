"""A quantized pipeline computes exactly what the quantized layers compute alone."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import compare
from tests.quantization.stacks import STACKS
from tests.quantization.training import (
    assert_recomputed_equals_kept,
    assert_saved_and_loaded,
    assert_trains_as_alone,
    ranges,
)
from tfgpipe import quantization


# Each kind of layers once; their pairs with schedules, cuts and sizes are in
# `tests/models/test_identity.py`.
@pytest.mark.parametrize(
    ("stack", "num_microbatches", "remat", "batch", "range_update"),
    [
        ("dense", 3, "stage", "unknown", "per_step"),
        ("convolutions", 8, "layer", "static", "per_step"),
        ("tokens", 3, "none", "static", "per_step"),
        ("custom", 8, "except_last", "unknown", "per_step"),
        ("dropout", 1, "layer", "unknown", "per_step"),
        ("normalized", 1, "stage", "static", "per_call"),
    ],
)
def test_outputs_gradients_and_ranges_are_those_of_the_layers_alone(
    stack, num_microbatches, remat, batch, range_update
):
    chosen = STACKS[stack]
    plain, pipelined = compare.pair(
        lambda: quantization.apply(chosen.make(), range_update=range_update),
        chosen.shape,
        chosen.dtype,
        num_stages=3,
        num_microbatches=num_microbatches,
        remat=remat,
    )
    x = chosen.data(8)
    specs = None
    if batch == "unknown":
        specs = [tf.TensorSpec([None, *chosen.shape], chosen.dtype)]
    before = ranges(plain)
    expected = compare.run(plain, x, graph=False, times=2)
    received = compare.run(pipelined, x, specs=specs, times=2)
    compare.assert_same(expected, received)
    after = ranges(plain)
    assert before.keys() == after.keys()
    for (name, value), was in zip(after.items(), before.values(), strict=True):
        if "num_updates" in name:
            assert value == was + 2
    assert any((after[name] != before[name]).any() for name in after)


def test_eight_microbatches_recomputed_equal_one_kept():
    assert_recomputed_equals_kept("dense", times=3)


@pytest.mark.parametrize(
    ("schedule", "remat", "policy"),
    [
        ("1f1b", "stage", "mixed_bfloat16"),
        ("zero_bubble", "stage", "mixed_float16"),
    ],
)
def test_every_schedule_trains_as_the_layers_alone(schedule, remat, policy):
    assert_trains_as_alone(schedule, remat, policy, num_stages=2)


@pytest.mark.parametrize(
    ("name", "policy"), [("custom", "mixed_bfloat16"), ("dense", "float32")]
)
def test_models_are_saved_and_loaded(name, policy, tmp_path):
    assert_saved_and_loaded(name, policy, tmp_path)


def test_each_microbatch_masks_gradients_by_the_weight_range_that_it_has_moved():
    """Ranges of weights that move with each call clip other weights in each one."""
    observer = quantization.MovingAverageRange(decay=0.5, initial=(-0.1, 0.1))
    config = quantization.QuantizeConfig(weights={"kernel": observer})

    def make():
        initializer = keras.initializers.RandomUniform(-1.0, 1.0, seed=1)
        dense = keras.layers.Dense(6, kernel_initializer=initializer, name="dense")
        return [quantization.QuantizeWrapper(dense, config, range_update="per_call")]

    plain, pipelined = compare.pair(
        make, (5,), "float32", num_stages=1, num_microbatches=3
    )
    x = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")
    before = plain.trainable_variables[0].numpy()
    with tf.GradientTape(persistent=True) as tape:
        outputs = [plain(x[m : m + 2], training=True) for m in (0, 2, 4)]
        loss = compare.squares(tf.concat(outputs, axis=0))
    parts = [tape.gradient(y, plain.trainable_variables[0], 1.0 + y) for y in outputs]
    clipped = [int(np.sum(part.numpy() == 0)) for part in parts]
    assert before.size > clipped[0] > clipped[1] > clipped[2]  # Else nothing is tested.
    expected = tape.gradient(loss, plain.trainable_variables)
    received = compare.run(pipelined, x)
    np.testing.assert_allclose(received.outputs, tf.concat(outputs, 0), rtol=1e-6)
    for a, b in zip(expected, received.weight_grads.values(), strict=True):
        compare.close(a.numpy(), b, "gradient", 1e-5, 1e-6)
    for a, b in zip(
        plain.non_trainable_variables, received.state.values(), strict=True
    ):
        compare.close(a.numpy(), b, a.path, 1e-6, 1e-6)
