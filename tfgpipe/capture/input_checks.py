"""Checks of what a pipeline is called on: inputs, side inputs and masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.capture import tracer


def check_dense(inputs: Any, name: str) -> None:
    """Raises TypeError if there is a ragged or sparse tensor among the inputs."""
    # Not `keras.tree`, which would take them for structures.
    for tensor in tf.nest.flatten(inputs):
        if isinstance(tensor, tf.RaggedTensor):
            raise TypeError(
                "A pipeline takes padded tensors, since microbatches of a ragged one "
                f"have no common shape. Layer '{name}' received a RaggedTensor of "
                f"shape {tensor.shape}. Pad it with `x.to_tensor()`, and mark the "
                "padding: `keras.layers.Embedding(..., mask_zero=True)` or "
                "`keras.layers.Masking()` as the first layer."
            )
        if isinstance(tensor, tf.SparseTensor):
            raise TypeError(
                f"A pipeline takes dense tensors. Layer '{name}' received a "
                f"SparseTensor of shape {tensor.shape}. Convert it with "
                "`tf.sparse.to_dense(x)`, or keep the layer that reads it outside."
            )


def check_structure(expected: Any, received: Any) -> None:
    """Raises ValueError if inputs have another structure than the layer was built with.

    Where there was a tensor there may be None, but not the other way round.
    """
    try:
        keras.tree.assert_same_structure(expected, received)
        pairs = zip(*map(keras.tree.flatten, (expected, received)), strict=True)
        same = all(a is not None or b is None for a, b in pairs)
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            "A pipeline is called on the structure of inputs it was built with. "
            f"Expected {_outline(expected)}; received {_outline(received)}. Nest the "
            "inputs in the same way."
        )


def _outline(structure: Any) -> str:
    shapes = keras.tree.map_structure(
        lambda x: "None" if x is None else f"Tensor(shape={tuple(x.shape)})", structure
    )
    return str(shapes).replace("'", "")


def check_side_inputs_are_used(
    layers: Sequence[keras.layers.Layer], side_inputs: Iterable[str]
) -> None:
    """Raises ValueError if no layer's `call` has an argument of a side input's name."""
    for name in side_inputs:
        if not any(tracer.accepts_argument(layer, name) for layer in layers):
            raise ValueError(
                "A side input goes to every layer whose `call` has an argument of its "
                f"name. Received '{name}', which no layer asks for. Name the argument "
                f"of the layer that uses it, `def call(self, x, {name}=None)`, or "
                "leave it out."
            )


def check_side_inputs(expected: Sequence[str], received: Mapping[str, Any]) -> None:
    """Raises ValueError for a side input that the layer was not built with."""
    given = [name for name, x in received.items() if x is not None]
    new = [name for name in given if name not in expected]
    if new:
        raise ValueError(
            "Side inputs are those that the pipeline was built with. Expected "
            f"{list(expected) or 'none'}; received {new}. Pass them in the first call "
            "as well; a Functional model takes them as inputs of its own."
        )


def check_equal_batches(tensors: Mapping[str, tf.Tensor]) -> None:
    """Raises ValueError if inputs have no batch axis, or different batch sizes."""
    for name, tensor in tensors.items():
        if len(tensor.shape) == 0:
            raise ValueError(
                "All inputs of a pipeline are split into microbatches, along their "
                f"first axis. Received a scalar, of shape (), as {name}. Give it a "
                "batch dimension, or keep it in a layer."
            )
    if not tensors:
        raise ValueError(
            "A pipeline splits its inputs into microbatches. Received no tensor among "
            "its inputs. Give at least one."
        )
    (first, batch), *others = [(name, x.shape[0]) for name, x in tensors.items()]
    for name, size in others:
        if None not in (size, batch) and size != batch:
            raise ValueError(
                "All inputs of a pipeline are split into microbatches together, so all "
                f"have the same batch size. Received {batch} examples of {first} and "
                f"a shape {tuple(tensors[name].shape)} of {name}. Repeat {name} for "
                "each, `tf.repeat(x[None], batch_size, axis=0)`, or keep it in a layer."
            )


def check_masks(inputs: Any, masks: Any) -> None:
    """Raises ValueError for masks of another structure or shape than their inputs.

    Args:
        inputs: Tensors `[B, ...]` in any structure.
        masks: In the same structure masks `[B, ...]`, of the first axes of their input,
            or None.
    """
    tensors, given = keras.tree.flatten(inputs), keras.tree.flatten(masks)
    if len(tensors) != len(given):
        raise ValueError(
            "`mask` has the structure of the inputs, with None where an input has no "
            f"mask. Expected {len(tensors)}; received {len(given)}."
        )
    for i, (x, mask) in enumerate(zip(tensors, given, strict=True)):
        if mask is None:
            continue
        axes = x.shape[: len(mask.shape)]
        sizes = zip(axes, mask.shape, strict=False)
        if len(mask.shape) > len(x.shape) or any(
            a != b and None not in (a, b) for a, b in sizes
        ):
            raise ValueError(
                "A mask has the sizes of the first axes of its input, such as (batch, "
                f"steps). Received a mask of shape {tuple(mask.shape)} for input {i} "
                f"of shape {tuple(x.shape)}. Drop the axis of features, or compute it "
                "from this input."
            )
