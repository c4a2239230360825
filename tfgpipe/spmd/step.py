"""The computations of an `SPMDPipeline`, each as one module for XLA.

What a TPU would be given, for compilers and CPUs of other frameworks: TensorFlow itself
partitions a computation on TPUs alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals, spmd
from tfgpipe._util import IdentityMap
from tfgpipe.spmd.layer import SPMDPipeline


@dataclasses.dataclass(frozen=True)
class PartitionedModule:
    """A computation, compiled up to XLA.

    Attributes:
        hlo: The serialized `HloModuleProto`.
        arguments: Its arguments: those of the function, then what that captures.
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


def train_step_module(
    model: keras.Model, x: tf.Tensor, y: tf.Tensor
) -> PartitionedModule:
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
        for layer in keras_internals.layers.inner_layers(model)
        if isinstance(layer, SPMDPipeline)
    ]
    if not pipelines:
        raise ValueError(
            "A computation is partitioned if it has a layer "
            f"`SPMDPipeline(..., partitioned=True)`. Model '{model.name}' has none."
        )
    keras_internals.compiled.build_compiled(model, (x, y))
    model.optimizer.build(model.trainable_variables)
    stacked = [v for layer in pipelines for v in layer.variables]
    slots = keras_internals.optimizers.optimizer_slots(model.optimizer)
    stacked += [slot for v in stacked for slot in slots.get(v, ())]
    return _lower(
        lambda x, y: model.train_step((x, y)), [x, y], stacked, layer=pipelines[0]
    )


def gradient_module(layer: SPMDPipeline, x: tf.Tensor) -> PartitionedModule:
    """Returns the two loops of a pipeline alone: outputs, then all gradients.

    The gradients are those of the sum of the outputs.

    Args:
        layer: A built `SPMDPipeline(..., partitioned=True)`.
        x: Its inputs.

    Raises:
        ValueError: If the layer is not partitioned.
    """

    def gradients(x: tf.Tensor) -> Any:
        weights = [v.value for v in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, [x, *weights])

    return _lower(gradients, [x], layer.variables, layer=layer)


def _lower(
    function: Callable[..., Any],
    given: list[tf.Tensor],
    stacked: list[keras.Variable],
    *,
    layer: SPMDPipeline,
) -> PartitionedModule:
    if layer.partitioned is not True:
        raise ValueError(
            "A computation is partitioned if it has a layer "
            f"`SPMDPipeline(..., partitioned=True)`. Received '{layer.name}' with "
            f"partitioned={layer.partitioned!r}."
        )
    compiled = tf.function(function, autograph=False, jit_compile=True)
    traced = compiled.get_concrete_function(*given)
    module = compiled.experimental_get_compiler_ir(*given)(stage="hlo_serialized")
    by_handle = IdentityMap((v.handle, v) for v in traced.variables)
    captured = [by_handle.get(c) for c in traced.captured_inputs]
    handles = IdentityMap((v.value.handle, None) for v in stacked)
    split = tuple(
        i
        for i, c in enumerate(traced.captured_inputs, start=len(given))
        if c in handles
    )
    values = [
        c if v is None else v.read_value()
        for c, v in zip(traced.captured_inputs, captured, strict=True)
    ]
    return PartitionedModule(
        spmd.with_split_arguments(module, split, num_parts=layer.num_stages),
        [*given, *values],
        [*[None] * len(given), *captured],
        spmd.updated_arguments(module),
        split,
        layer.num_stages,
    )
