"""A quantized pipeline computes exactly what the quantized layers compute alone."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, train_steps
from tests.helpers.marks import nightly
from tests.quantization.stacks import STACKS
from tfgpipe import quantization
from tfgpipe.capture import dtype_policies


def ranges(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the ranges of a model, and how often they have moved."""
    return {
        f"{i}: {v.path}": v.numpy()
        for i, v in enumerate(model.non_trainable_variables)
        if v.name.endswith(("_min", "_max", "num_updates"))
    }


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
    compare.assert_runs_the_same(plain, pipelined, x, specs=specs, times=2)
    after = ranges(plain)
    assert before.keys() == after.keys()
    for (name, value), was in zip(after.items(), before.values(), strict=True):
        if "num_updates" in name:
            assert value == was + 2
    assert any((after[name] != before[name]).any() for name in after)


@pytest.mark.parametrize("name", ["dense", *nightly(["custom"])])
def test_eight_microbatches_recomputed_equal_one_kept(name):
    """Loss and gradients to 1e-6, ranges to the last bit."""
    chosen = STACKS[name]
    runs, models = [], []
    for num_microbatches, remat in ((1, "none"), (8, "stage")):
        keras.utils.set_random_seed(0)
        compare.fresh_names()
        model = compare.pipelined_model(
            lambda: quantization.apply(chosen.make()),
            chosen.shape,
            chosen.dtype,
            num_stages=2,
            num_microbatches=num_microbatches,
            remat=remat,
        )
        models.append(model)
        runs.append(compare.run(model, chosen.data(16), times=3))
    compare.assert_same(*runs, rtol=1e-6, atol=1e-6)
    # Where a vector of numbers does not fill the last instruction, sigmoids of the same
    # row may differ in the last bit between batches of other sizes.
    rtol = 0 if name == "dense" else 1e-6
    for path, value in ranges(models[0]).items():
        np.testing.assert_allclose(ranges(models[1])[path], value, rtol, err_msg=path)


@pytest.mark.parametrize(
    ("num_stages", "schedule", "remat", "policy"),
    [
        (2, "1f1b", "stage", "mixed_bfloat16"),
        (2, "zero_bubble", "stage", "mixed_float16"),
        *nightly(
            [
                (4, "gpipe", "stage", "float32"),
                (4, "1f1b", "none", "float32"),
                (4, "interleaved", "stage", "float32"),
                (4, "zero_bubble", "none", "float32"),
                (4, "1f1b", "stage", "mixed_bfloat16"),
                (4, "interleaved", "none", "mixed_bfloat16"),
                (4, "gpipe", "none", "mixed_float16"),
                (4, "zero_bubble", "stage", "mixed_float16"),
            ]
        ),
    ],
)
def test_every_schedule_trains_as_the_layers_alone(num_stages, schedule, remat, policy):
    """In loss, gradients and state of a step of `fit`."""
    with dtype_policies.default_policy_scope(policy):
        chosen = STACKS["dense"]
        plain, pipelined = (
            tfgpipe.PipelinedModel(
                quantization.apply(
                    [layer for _ in range(num_stages // 2) for layer in chosen.make()]
                ),
                num_stages=K,
                num_microbatches=M,
                schedule=kind,
                remat=remat,
            )
            for K, M, kind in ((1, 1, "gpipe"), (num_stages, 4, schedule))
        )
        plain = keras.Sequential(
            [keras.Input(chosen.shape), *plain.pipelined.layers], name="plain"
        )
        x, y = chosen.data(8), np.ones([8, 3], "float32")
        pipelined.build((None, *chosen.shape))
        compare.copy_state(plain, pipelined)
        for model in (plain, pipelined):
            model.compile(train_steps.Keeps(), "mse")
        expected, received = (
            train_steps.train(plain, x, y),
            train_steps.train(pipelined, x, y),
        )
    # In half precision each microbatch rounds its gradient, to 2^-8 or 2^-11.
    rtol = {"float32": 1e-5, "mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}[policy]
    np.testing.assert_allclose(received.logs["loss"], expected.logs["loss"], rtol)
    for (name, a), b in zip(
        expected.gradients.items(), received.gradients.values(), strict=True
    ):
        compare.close(a, b, name, rtol, rtol * np.abs(a).max())
    for (name, a), b in zip(
        expected.state.items(), received.state.values(), strict=True
    ):
        np.testing.assert_array_equal(a, b, name)


@pytest.mark.parametrize(
    ("name", "policy"),
    nightly(
        zip(STACKS, itertools.cycle(["float32", "mixed_bfloat16"]), strict=False),
        gate=[("custom", "mixed_bfloat16"), ("dense", "float32")],
    ),
)
def test_models_are_saved_and_loaded(name, policy, tmp_path):
    """A file gives weights, ranges and outputs, and goes on from there."""
    with dtype_policies.default_policy_scope(policy):
        chosen = STACKS[name]
        model = compare.pipelined_model(
            lambda: quantization.apply(
                chosen.make(), delay=1, freeze_after=5, range_update="per_call"
            ),
            chosen.shape,
            chosen.dtype,
            num_stages=2,
            num_microbatches=2,
        )
    x = chosen.data(4)
    model(x, training=True)
    loaded = compare.reloaded(model, tmp_path)
    compare.assert_equal(model.weights, loaded.weights)
    # A product in half precision may round otherwise at another address in memory.
    rtol = 2**-7 if policy == "mixed_bfloat16" else 0
    expected, received = (tf.cast(m(x), tf.float32) for m in (model, loaded))
    np.testing.assert_allclose(received, expected, rtol, rtol)
    loaded(x, training=True)
    assert {int(v) for n, v in ranges(loaded).items() if "num_updates" in n} == {4}


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
    compare.assert_close(expected, received.weight_grads.values(), 1e-5, 1e-6)
    compare.assert_close(
        plain.non_trainable_variables, received.state.values(), 1e-6, 1e-6
    )
