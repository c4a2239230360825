"""A quantized pipeline beside the quantized layers alone: trained, and from a file."""

from __future__ import annotations

import itertools
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, train_steps
from tests.quantization.stacks import STACKS
from tfgpipe import quantization
from tfgpipe.capture import dtype_policies

SCHEDULES = [
    ("gpipe", "stage", "float32"),
    ("1f1b", "none", "float32"),
    ("interleaved", "stage", "float32"),
    ("zero_bubble", "none", "float32"),
    ("1f1b", "stage", "mixed_bfloat16"),
    ("interleaved", "none", "mixed_bfloat16"),
    ("gpipe", "none", "mixed_float16"),
    ("zero_bubble", "stage", "mixed_float16"),
]
FILES = [*zip(STACKS, itertools.cycle(["float32", "mixed_bfloat16"]), strict=False)]


def ranges(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the ranges of a model, and how often they have moved."""
    return {
        f"{i}: {v.path}": v.numpy()
        for i, v in enumerate(model.non_trainable_variables)
        if v.name.endswith(("_min", "_max", "num_updates"))
    }


def assert_recomputed_equals_kept(name: str, *, times: int) -> None:
    """Asserts the contract: loss and gradients to 1e-6, ranges to the last bit.

    Args:
        name: One of `STACKS`.
        times: How many steps are taken; the last is compared.
    """
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
        runs.append(compare.run(model, chosen.data(16), times=times))
    compare.assert_same(*runs, rtol=1e-6, atol=1e-6)
    # Where a vector of numbers does not fill the last instruction, sigmoids of the same
    # row may differ in the last bit between batches of other sizes.
    rtol = 0 if name == "dense" else 1e-6
    for path, value in ranges(models[0]).items():
        np.testing.assert_allclose(ranges(models[1])[path], value, rtol, err_msg=path)


def assert_trains_as_alone(
    schedule: str, remat: str, policy: str, *, num_stages: int
) -> None:
    """Asserts that a step of `fit` has loss, gradients and state of the layers alone.

    Args:
        schedule: A schedule's name.
        remat: What is recomputed.
        policy: The dtype policy that all is made under.
        num_stages: K, of two layers each.
    """
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


def assert_saved_and_loaded(name: str, policy: str, folder: Path) -> None:
    """Asserts that a file gives weights, ranges and outputs, and goes on from there.

    Args:
        name: One of `STACKS`.
        policy: The dtype policy that all is made under.
        folder: Where the file is written.
    """
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
    path = folder / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    for a, b in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    # A product in half precision may round otherwise at another address in memory.
    rtol = 2**-7 if policy == "mixed_bfloat16" else 0
    expected, received = (tf.cast(m(x), tf.float32) for m in (model, loaded))
    np.testing.assert_allclose(received, expected, rtol, rtol)
    loaded(x, training=True)
    assert {int(v) for n, v in ranges(loaded).items() if "num_updates" in n} == {4}


def assert_frozen_is_saved_and_copied(what: str, pipelined: bool, folder: Path) -> None:
    """Asserts that what was frozen after training comes back, and in a plain copy.

    Args:
        what: What is frozen: the "model", a "wrapper", or the "layer" inside.
        pipelined: Whether the model is a pipeline.
        folder: Where the file is written.
    """
    x = np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)
    stack = quantization.apply([keras.layers.Dense(3), keras.layers.Dense(2)])
    if pipelined:
        model = tfgpipe.PipelinedModel(stack, num_stages=2, num_microbatches=2)
    else:
        model = keras.Sequential([keras.Input((4,)), *stack])
    model(x, training=True)
    frozen = {"model": model, "wrapper": stack[1], "layer": stack[1].layer}[what]
    frozen.trainable = False
    path = folder / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    np.testing.assert_array_equal(loaded(x), model(x))
    np.testing.assert_allclose(quantization.plain_copy(model)(x), model(x), atol=1e-6)
