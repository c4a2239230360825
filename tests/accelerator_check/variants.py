"""Whether replicas, and stages compiled by XLA, give what is given without."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from benchmarks import tables
from tests.accelerator_check import models
from tests.accelerator_check.devices import Machine
from tests.accelerator_check.difference import TOLERANCES, difference
from tests.accelerator_check.report import Recorder
from tests.helpers import compare, identity_models, train_steps, zoo

M = 4


def replicas_part(recorder: Recorder, machine: Machine) -> None:
    """Compares a step of two replicas with a step of one that has all examples."""
    models.need(machine, 2)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    ways = ["reduce", "ring"]
    if machine.kind == "GPU" and not machine.is_divided:
        ways.append("nccl")
    else:
        what = "parts of one GPU" if machine.kind == "GPU" else "CPUs"
        recorder.left_out(f"NCCL: it sums over GPUs; these are {what}")
    for way in ways:
        found = _of_replicas(machine, all_reduce=way)
        recorder.row(
            "Two replicas", all_reduce=way, K=len(machine.devices) // 2, **found
        )
        if late := [name for name, x in found.items() if not x <= 1]:
            recorder.failed(f"all_reduce={way!r}: {', '.join(late)} differ")


def _of_replicas(machine: Machine, *, all_reduce: Any) -> dict[str, float]:
    num_stages = len(machine.devices) // 2
    strategy = tfgpipe.PipelineStrategy(
        num_stages=num_stages,
        num_replicas=2,
        devices=machine.devices[: 2 * num_stages],
        all_reduce=all_reduce,
    )
    found: list[tuple[Any, list[np.ndarray]]] = []
    weights: list[np.ndarray] = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        compare.fresh_names()
        with scope:
            stack = identity_models.STACKS["dense"].make(keras.layers.Dense)
            model: Any = keras.Sequential(stack)
            if found:
                model = tfgpipe.PipelinedModel(
                    stack, num_stages=num_stages, num_microbatches=M
                )
            model.build((None, 5))
            weights = weights or model.get_weights()
            model.set_weights(weights)
            model.compile(keras.optimizers.SGD(1.0), "mse")
        data = zoo.floats(4 * M, 5), zoo.floats(4 * M, 3, seed=2)
        history = model.fit(*data, batch_size=4 * M, shuffle=False, verbose=0).history
        after = model.get_weights()
        gradients = [a - b for a, b in zip(weights, after, strict=True)]
        found.append((history["loss"], gradients))
    (loss, gradients), (our_loss, our_gradients) = found
    t = TOLERANCES["float32"]
    return {
        "loss": difference(loss, our_loss, t),
        "gradients": difference(gradients, our_gradients, t),
    }


def xla_part(recorder: Recorder, machine: Machine) -> None:
    """Compares steps whose stages XLA compiles with steps whose stages it does not."""
    models.need(machine, 2)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    num_steps = 5 if machine.quick else 20
    found: dict[bool, tuple[np.ndarray, list[np.ndarray]]] = {}
    rows: list[tables.Row] = []
    before: list[np.ndarray] = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(0)
        compare.fresh_names()
        model = models.block_model(machine, jit_compile=jit_compile)
        optimizer = train_steps.Keeps()
        model.compile(optimizer, "mse")
        before = before or model.get_weights()
        model.set_weights(before)
        x, y = models.block_data(machine)
        started = time.perf_counter()
        loss = float(model.train_on_batch(x, y))
        first = time.perf_counter() - started
        found[jit_compile] = np.array(loss), [x.numpy() for x in optimizer.kept]
        seconds = models.time_steps(model, x, y, num_steps)
        ms = 1e3 * seconds
        rows.append({"XLA": jit_compile, "first step s": first, "step ms": ms})
    for row in rows:
        recorder.row("Encoder blocks, 1F1B", **row)
    (loss_off, gradients_off), (loss_on, gradients_on) = found.values()
    differences = {
        "loss": difference([loss_off], [loss_on], TOLERANCES["float32"]),
        "gradients": difference(gradients_off, gradients_on, TOLERANCES["float32"]),
    }
    recorder.row("With XLA and without", **differences)
    if late := [name for name, x in differences.items() if not x <= 1]:
        recorder.failed(f"With XLA {', '.join(late)} differ")
