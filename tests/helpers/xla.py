"""The programs of a pipeline on cores of a TPU, compiled by XLA for a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tests.helpers import fake_tpu
from tests.helpers.fake_tpu import core_of
from tfgpipe import schedules
from tfgpipe._compat import keras_internals
from tfgpipe.devices import names
from tfgpipe.distribution import placement


@dataclasses.dataclass(frozen=True)
class _OnCores(placement.Placement):
    """Names the cores, outside any strategy."""

    @property
    def shard_devices(self) -> tuple[tuple[str, ...], ...]:
        return tuple((names.tpu_core_name(k),) for k in range(self.mesh.num_stages))


def _layers() -> list[keras.layers.Layer]:
    return [
        keras.layers.Embedding(10, 8),
        keras.layers.Dense(8, activation="gelu"),
        keras.layers.LayerNormalization(),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ]


def assert_programs_by_xla_give_the_same(schedule: Any, remat: Any) -> None:
    """Asserts that programs that name cores, compiled by XLA, give what others do.

    In double precision, which is to be set before.

    Args:
        schedule: A schedule's name.
        remat: What is recomputed.
    """
    x = np.arange(8 * 4).reshape(8, 4) % 10
    y = np.linspace(0, 1, 8)[:, None]
    keras.utils.set_random_seed(1)
    model = tfgpipe.PipelinedModel(
        _layers(),
        num_stages=2,
        num_microbatches=4,
        remat=remat,
        batch_norm="deferred",
        devices=["CPU:0", "CPU:0"],
    )
    model(x)
    model.compile("sgd", "mse")
    keras_internals.build_compiled(model, (x, y))
    order = schedules.make(schedule, num_stages=2, num_microbatches=4)

    def gradients(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        model._loss_pipelines.clear()
        with keras_internals.without_autocast():
            result = model._loss_pipeline(y, None).train(
                model.pipelined.pipeline.flatten_inputs(x, {}),
                y,
                None,
                schedule=order,
                loss_grad=tf.ones([], tf.float64),
            )
        return [
            result.compiled_loss,
            *(result.gradients[v] for v in model.trainable_weights),
            *(update.value for update in result.updates),
        ]

    before = model.get_weights()
    expected = tf.function(gradients)(tf.constant(x), tf.constant(y))
    model.set_weights(before)  # Statistics have moved.
    pipeline = model.pipelined.pipeline
    on_cores = _OnCores(pipeline.placement.mesh, None)
    model.pipelined._pipeline = dataclasses.replace(pipeline, placement=on_cores)
    compiled = tf.function(gradients, jit_compile=True)
    received = compiled(tf.constant(x), tf.constant(y))
    for plain, by_xla in zip(expected, received, strict=True):
        np.testing.assert_allclose(by_xla, plain, rtol=1e-10, atol=1e-12)
    graph = compiled.get_concrete_function(tf.constant(x), tf.constant(y)).graph
    named = {core_of(op) for op in fake_tpu.operations(graph)}
    assert named >= {0, 1}
    # What keeps XLA from keeping what is to be recomputed.
    text = compiled.experimental_get_compiler_ir(tf.constant(x), tf.constant(y))()
    assert "opt-barrier" in text
