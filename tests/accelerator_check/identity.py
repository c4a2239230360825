"""Whether steps of small models on the devices are those of the plain models.

Tolerances are relative to the largest entry of what is compared, such as all gradients
of a model. A difference is in units of what is tolerated: 1 is the most that passes.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tests.accelerator_check.devices import Machine
from tests.accelerator_check.difference import TOLERANCES, difference
from tests.accelerator_check.models import need
from tests.accelerator_check.report import Recorder
from tests.helpers import compare, pairwise, train_steps, zoo
from tests.helpers.identity_cases import devices_of
from tests.helpers.identity_models import Dense, Stack
from tests.helpers.reference import InMicrobatches
from tfgpipe import quantization, schedules

layers = keras.layers

M, ROWS = 4, 8
LEARNING_RATE = 0.5


# -- the models -----------------------------------------------------------------------


def _mlp(dense: Dense) -> list[keras.layers.Layer]:
    return [*(dense(16, activation="tanh") for _ in range(5)), dense(3)]


def _cnn(dense: Dense) -> list[keras.layers.Layer]:
    stack: list[Any] = []
    for filters in (8, 8):
        # A bias before a normalization would have nothing but rounding as its gradient.
        stack += [
            layers.Conv2D(filters, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
        ]
    return [*stack, layers.Flatten(), dense(3)]


def _transformer(dense: Dense) -> keras.Model:
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(zoo.IDS, 16, mask_zero=True)(inputs)
    for seed in (1, 3):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(2, 8, dropout=0.1, seed=seed)
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = dense(32, activation="gelu")(layers.LayerNormalization()(x))
        y = layers.Dropout(0.2, seed=seed + 1)(dense(16)(y))
        x = layers.Add()([x, y])
    return keras.Model(inputs, dense(zoo.IDS)(x))


def _quantized(dense: Dense) -> list[keras.layers.Layer]:
    return list(quantization.apply(_mlp(dense), range_update="per_step"))


STACKS = {
    "MLP": Stack(_mlp, (8,)),
    "CNN with batch normalization": Stack(_cnn, (8, 8, 3), rowwise=False),
    "causal transformer": Stack(_transformer, (12,), ids=True, rowwise=False),
    "quantized MLP": Stack(_quantized, (8,)),
}
FACTORS = {
    "stack": tuple(STACKS),
    # Others run the same kinds of actions.
    "schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipe_v"),
    "remat": ("none", "stage", "layer"),
    "dtype": tuple(TOLERANCES),
    # By XLA nothing, chains of elementwise operations, or every stage function.
    "jit_compile": (False, "auto", True),
}
# Simulated integers are of single precision.
IMPOSSIBLE = (lambda stack, dtype: stack == "quantized MLP" and dtype != "float32",)


class Moves(train_steps.Keeps):
    """Keeps the gradients it is given, and goes down by them."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Keeps a gradient, and moves its weight."""
        super().update_step(gradient, variable, learning_rate)
        whole = tf.convert_to_tensor(gradient)
        self.assign_sub(variable, whole * tf.cast(learning_rate, whole.dtype))


# -- the cases ------------------------------------------------------------------------


def cases(*, quick: bool) -> list[dict[str, Any]]:
    """Returns cases with all pairs of values; quick, with each value once."""
    drawn = pairwise.all_pairs(
        FACTORS, impossible=IMPOSSIBLE, strength=1 if quick else 2
    )
    return [dict(zip(FACTORS, case, strict=True)) for case in drawn]


def identity_part(recorder: Recorder, machine: Machine) -> None:
    """Compares two steps of small models with those of the plain ones."""
    need(machine, 2)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    recorder.text(
        "Two steps, TF32 off. `difference` is the largest, of the tolerance: "
        + ", ".join(f"{x:.0e} for {name}" for name, x in TOLERANCES.items())
        + ", of the largest entry and of each."
    )
    drawn = cases(quick=machine.quick)
    for done, case in enumerate(drawn):
        if recorder.seconds_left < 20:
            recorder.left_out(f"{len(drawn) - done} of {len(drawn)} cases: time")
            return
        started = time.perf_counter()
        try:
            found = _differences(machine, **case)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:500]}"
            recorder.failed(f"{_named(case)}: {text}")
            continue
        recorder.row(
            "Cases",
            **case,
            **found,
            seconds=time.perf_counter() - started,
        )
        if late := [name for name, x in found.items() if not x <= 1]:
            recorder.failed(f"{_named(case)}: {', '.join(late)} differ")


def _named(case: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.items())


def _differences(
    machine: Machine,
    *,
    stack: str,
    schedule: schedules.Name,
    remat: Any,
    dtype: str,
    jit_compile: Any,
) -> dict[str, float]:
    """Returns differences, of what is tolerated, by what differs."""
    made, num_stages = STACKS[stack], len(machine.devices)
    if schedules.find(schedule).deals_stages:
        num_stages -= num_stages % 2
    num_devices = devices_of(schedule, num_stages)
    keras.config.set_dtype_policy(dtype)
    try:
        keras.utils.set_random_seed(0)
        compare.fresh_names()
        plain = made.model(made.make(layers.Dense))
        compare.fresh_names()
        pipelined = tfgpipe.pipeline(
            made.model(made.make(layers.Dense)),
            num_stages=num_stages,
            num_microbatches=M,
            schedule=schedule,
            remat=remat,
            jit_compile=jit_compile,
            devices=machine.devices[:num_devices],
        )
        compare.copy_state(plain, pipelined)
        reference = plain if made.rowwise else InMicrobatches(plain, M)
        x = made.inputs(ROWS)
        data = [x, made.targets(ROWS, reference(x).shape[1:])]
        # XLA draws other random numbers than TensorFlow's kernels, as in Keras itself.
        by_xla = jit_compile is True or (
            jit_compile == "auto" and machine.kind != "CPU"
        )
        steps = []
        for model in (reference, pipelined):
            optimizer = Moves(LEARNING_RATE)
            if dtype == "mixed_float16":
                optimizer = keras.optimizers.LossScaleOptimizer(
                    optimizer, initial_scale=1024.0
                )
            of_plain = {"jit_compile": by_xla} if model is reference else {}
            model.compile(optimizer, **made.compiled(), **of_plain)
            steps.append(
                [train_steps.train(model, *data, eagerly=not by_xla) for _ in range(2)]
            )
    finally:
        keras.config.set_dtype_policy("float32")
    (first, last), (our_first, our_last) = steps
    if not any(np.any(g) for g in first.gradients.values()):
        raise ArithmeticError("The plain model has no gradient that is not zero.")
    pairs = {
        "loss": [(first.logs, our_first.logs), (last.logs, our_last.logs)],
        "gradients": [(first.gradients, our_first.gradients)],
        "state": [(last.state, our_last.state)],
    }
    weights = [
        {v.path: v.numpy() for v in model.trainable_variables}
        for model in (plain, pipelined)
    ]
    pairs["weights"] = [(weights[0], weights[1])]
    return {
        name: max(
            difference(list(a.values()), list(b.values()), TOLERANCES[dtype])
            for a, b in found
        )
        for name, found in pairs.items()
    }
