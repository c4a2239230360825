"""The models that are measured, and the time of their steps."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from benchmarks.workloads import EncoderBlock
from tests.accelerator_check.devices import Machine
from tests.accelerator_check.report import NotRunError
from tests.helpers import compare
from tfgpipe_params.lm.sizes import Transformer
from tfgpipe_params.lm.transformer import decoder_only

M = 8


def language_model(
    machine: Machine,
    *,
    dtype: str = "float32",
    devices: list[str] | None = None,
    jit_compile: Any = "auto",
) -> tuple[tfgpipe.PipelinedModel, tuple[Any, Any]]:
    """Returns a pipeline, compiled, and a batch for it."""
    plain, batch = plain_language_model(machine, dtype=dtype, device="CPU:0")
    model = tfgpipe.pipeline(
        plain,
        num_stages=len(machine.devices),
        num_microbatches=M,
        schedule="1f1b",
        remat="stage",
        jit_compile=jit_compile,
        devices=devices or machine.devices,
    )
    model.compile("adam", plain.loss)
    return model, batch


def plain_language_model(
    machine: Machine, *, dtype: str = "float32", device: str
) -> tuple[keras.Model, tuple[Any, Any]]:
    """Returns the model of Keras on one device, compiled, and a batch for it."""
    sizes, batch_size = sizes_of(machine)
    compare.fresh_names()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(dtype)
    try:
        with tf.device(device):
            model = decoder_only(sizes)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, jit_compile=False)
    finally:
        keras.config.set_dtype_policy("float32")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (batch_size, sizes.context), dtype=np.int32)
    return model, (x, np.roll(x, -1, axis=1))


def sizes_of(machine: Machine) -> tuple[Transformer, int]:
    """Returns the sizes of `language_model`, and of its batch."""
    if machine.quick:
        small: Any = {"width": 64, "num_heads": 4, "mlp_width": 256, "context": 32}
        return Transformer(num_layers=len(machine.devices), dropout=0.1, **small), 16
    large: Any = {"width": 768, "num_heads": 12, "mlp_width": 3072, "context": 512}
    return Transformer(num_layers=8, dropout=0.1, **large), 32


def dtypes(machine: Machine) -> list[str]:
    """Returns the types in which it is measured."""
    return ["float32"] if machine.quick else ["float32", "mixed_bfloat16"]


def block_model(
    machine: Machine, *, jit_compile: Any = "auto", remat: Any = "stage"
) -> tfgpipe.PipelinedModel:
    """Returns a pipeline of encoder blocks, built and compiled."""
    model = tfgpipe.PipelinedModel(
        [
            EncoderBlock()
            for _ in range(len(machine.devices) * (1 if machine.quick else 3))
        ],
        num_stages=len(machine.devices),
        num_microbatches=M,
        schedule="1f1b",
        remat=remat,
        jit_compile=jit_compile,
        devices=machine.devices,
    )
    model.build(block_shape(machine))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def block_shape(machine: Machine) -> tuple[int, int, int]:
    """Returns the shape of a batch of `block_model`."""
    return (16, 32, 64) if machine.quick else (32, 512, 768)


def block_data(machine: Machine) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns inputs and targets of a batch of `block_model`."""
    shape = block_shape(machine)
    x, y = np.random.default_rng(0).standard_normal((2, *shape), dtype=np.float32)
    return tf.constant(x), tf.constant(y)


def time_steps(model: keras.Model, x: Any, y: Any, num_steps: int) -> float:
    """Returns the seconds of a step, the mean of some, after one that is not timed."""
    model.train_on_batch(x, y)
    started = time.perf_counter()
    for _ in range(num_steps):
        model.train_on_batch(x, y)  # Waits for the loss.
    for weight in model.trainable_variables:
        weight.numpy()  # And for the last update.
    return (time.perf_counter() - started) / num_steps


def need(machine: Machine, num_devices: int) -> None:
    """Checks that there are devices for a part.

    Raises:
        NotRunError: If there are not.
    """
    if machine.kind == "TPU":
        raise NotRunError("on TPUs the machine and the trainer alone are checked")
    if len(machine.devices) < num_devices:
        raise NotRunError(f"{num_devices} devices are needed; {machine.devices}")
