"""The train step of a model with an `SPMDPipeline`, as one module for XLA.

What a TPU would be given, for compilers and CPUs of other frameworks: TensorFlow itself
partitions a computation on TPUs alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals, spmd
from tfgpipe._util import IdentityMap
from tfgpipe.spmd.layer import SPMDPipeline


@dataclasses.dataclass(frozen=True)
class StepModule:
    """A train step, compiled up to XLA.

    Attributes:
        hlo: The serialized `HloModuleProto`.
        arguments: The arguments: those of the step, then what it captures.
        variables: For each argument the variable that it is the value of, or None.
        updates: For results that are the new value of a variable, by their index: the
            index of the argument that is the old one.
        split: Indices of the arguments that are split over the cores.
        num_partitions: K.
    """

    hlo: bytes
    arguments: list[tf.Tensor]
    variables: list[tf.Variable | None]
    updates: dict[int, int]
    split: tuple[int, ...]
    num_partitions: int


def train_step_module(model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> StepModule:
    """Returns the train step of a compiled model, on one batch.

    It makes the logs that Keras shows, and then the new values of variables.

    Args:
        model: A built model with an `SPMDPipeline(..., partitioned=True)`.
        x: The inputs of a batch.
        y: The targets.

    Raises:
        ValueError: If the model has no such layer.
    """
    pipelines = [
        layer
        for layer in keras_internals.inner_layers(model)
        if isinstance(layer, SPMDPipeline) and layer.partitioned is True
    ]
    if not pipelines:
        raise ValueError(
            "The train step of a partitioned model is that of one with an "
            f"`SPMDPipeline(..., partitioned=True)`. Received '{model.name}' without."
        )
    keras_internals.build_compiled(model, (x, y))
    model.optimizer.build(model.trainable_variables)
    stacked = [v for layer in pipelines for v in layer.variables]
    slots = keras_internals.optimizer_slots(model.optimizer)
    stacked += [slot for v in stacked for slot in slots.get(v, ())]
    handles = IdentityMap((v.value.handle, v.value) for v in stacked)
    K = pipelines[0].num_stages

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        return model.train_step((x, y))

    compiled = tf.function(step, autograph=False, jit_compile=True)
    traced = compiled.get_concrete_function(x, y)
    named = IdentityMap((v.handle, v) for v in traced.variables)
    variables = [None, None, *(named.get(c) for c in traced.captured_inputs)]
    arguments = [
        x,
        y,
        *(
            c if v is None else v.read_value()
            for c, v in zip(traced.captured_inputs, variables[2:], strict=True)
        ),
    ]
    split = tuple(
        i + 2
        for i, captured in enumerate(traced.captured_inputs)
        if captured in handles
    )
    module = compiled.experimental_get_compiler_ir(x, y)(stage="hlo_serialized")
    return StepModule(
        spmd.with_split_arguments(module, split, num_parts=K),
        arguments,
        variables,
        spmd.updated_arguments(module),
        split,
        K,
    )
