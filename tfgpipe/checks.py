"""What a pipeline refuses, and the words in which it does.

Each check returns the value it was given, or raises an error that says what is wrong,
what was received and what to try.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfgpipe.stage import Stage

LayerStep = tuple[keras.layers.Layer, keras.KerasTensor, keras.KerasTensor]

# A batch size that no layer is likely to make out of another dimension.
_PROBE = 8191

# Keras' own layers, which keep the batch dimension.
_KERAS_OWN = ("keras",)


def batch_is_kept(steps: Sequence[LayerStep]) -> None:
    """Raises ValueError if a layer's output has another batch size than its input."""
    probed = {_KERAS_OWN}
    for layer, before, after in steps:
        kind = _kind(layer, before)
        if before.shape[0] is None and kind not in probed:
            # With an unknown batch size all looks well; try one that is known.
            probed.add(kind)
            before = keras.KerasTensor((_PROBE, *before.shape[1:]), before.dtype)
            after = layer.compute_output_spec(before)
        if not after.shape or after.shape[0] != before.shape[0]:
            raise ValueError(
                "Every layer in a pipeline must keep the batch dimension, since it "
                f"sees only one microbatch at a time. Layer '{layer.name}' maps shape "
                f"{before.shape} to {after.shape}. Keep the layer outside the "
                "pipeline."
            )


def _kind(layer: keras.layers.Layer, inputs: keras.KerasTensor) -> tuple[Any, ...]:
    """Returns what layers that treat the batch dimension alike have in common."""
    if isinstance(layer, keras.layers.Lambda | keras.Model):
        return (id(layer),)  # May hold anything.
    if type(layer).__module__.startswith("keras."):
        return _KERAS_OWN
    try:
        config = {**layer.get_config(), "name": None}
    except NotImplementedError:  # A layer need not have one.
        config = {}
    return (type(layer), inputs.shape[1:], repr(config))


def one_tensor(inputs: Any, name: str) -> None:
    """Raises TypeError if `inputs` is a structure rather than a tensor."""
    if isinstance(inputs, list | tuple | dict):
        raise TypeError(
            f"A pipeline takes one tensor. Layer '{name}' received a "
            f"{type(inputs).__name__}. Make an array or tensor of it; if it holds "
            "several, combine them in a layer before the pipeline."
        )


def owned_variables(stages: Sequence[Stage]) -> list[tuple[Stage, list[Any]]]:
    """Returns for each stage its variables, those that stages share at the first.

    Raises:
        ValueError: If stages share a variable that is not a weight, since each of them
            would advance it from the same value.
    """
    owners: dict[int, Stage] = {}
    owned = []
    for stage in stages:
        for variable in stage.state:
            if id(variable) in owners:
                raise ValueError(
                    "Stages can share weights, but not seeds, statistics or frozen "
                    f"weights. Received '{variable.path}' in stages "
                    f"{owners[id(variable)].index} and {stage.index}. Use a layer of "
                    "its own in each, or a `balance` that keeps them together."
                )
        mine = [v for v in (*stage.weights, *stage.state) if id(v) not in owners]
        owners.update({id(variable): stage for variable in mine})
        owned.append((stage, mine))
    return owned


def layer_list(
    layers: Sequence[keras.layers.Layer],
) -> Sequence[keras.layers.Layer]:
    """Returns `layers` if it is a non-empty list of different Keras layers."""
    if not isinstance(layers, Sequence) or not layers:
        raise ValueError(
            "`layers` must be a non-empty list of Keras layers, or a "
            f"`keras.Sequential`. Received {layers!r}."
        )
    seen: dict[int, int] = {}
    for position, layer in enumerate(layers):
        if not isinstance(layer, keras.layers.Layer):
            raise TypeError(
                "`layers` must hold Keras layers. Received at position "
                f"{position}: {layer!r} of type {type(layer).__name__}. Wrap a "
                "function as `keras.layers.Lambda(function)`."
            )
        if id(layer) in seen:
            raise ValueError(
                "`layers` must hold each layer object once. Received layer "
                f"'{layer.name}' at positions {seen[id(layer)]} and {position}. Create "
                "one layer for each position."
            )
        seen[id(layer)] = position
    return layers


def num_microbatches(num_microbatches: int) -> int:
    """Returns M if it is a positive integer."""
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(
            "`num_microbatches` must be an integer of at least 1. Received "
            f"{num_microbatches!r}. Four times the number of stages is a good start."
        )
    return num_microbatches


def choice(argument: str, value: Any, choices: Sequence[Any]) -> Any:
    """Returns the value of an argument if it is one of the choices."""
    if not any(value is choice or value == choice for choice in choices):
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{argument}` must be one of {expected}. Received {value!r}.")
    return value
