"""Layers as a traced stage."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfgpipe import remat as remats
from tfgpipe.capture import tracer
from tfgpipe.capture.interpreter import TensorKey
from tfgpipe.stage import functions
from tfgpipe.stage.options import StageOptions
from tfgpipe.stage.stage import Stage, StageCache

layers = keras.layers
ROWS, WIDTH = 2, 4


def dense(depth=3, activation="tanh"):
    return [layers.Dense(WIDTH, activation=activation) for _ in range(depth)]


def traced(stack, *, first=False, dtype="float32", remat="stage", **mode):
    """Returns layers as a traced stage; the first of a pipeline, or one within."""
    given = keras.KerasTensor((ROWS, WIDTH), dtype)
    recorded = tracer.capture_layers(stack, given, {})
    stage = Stage(0, recorded.graph.segment(slice(0, len(stack))), StageCache())
    return stage, stage.traced(
        {TensorKey(0): tf.TensorSpec([ROWS, WIDTH], dtype)},
        StageOptions(remat=remats.find(remat), **mode),
        non_differentiable=(0,) if first else (),
    )


def products(some: functions.StageFunction) -> int:
    """Returns how many matrices a function multiplies."""
    operations = some.function.graph.get_operations()
    return sum(op.type == "MatMul" for op in operations)
