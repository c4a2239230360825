"""Recomputing one layer at a time, for `remat="layer"`.

When a stage is recomputed as a whole, its backward holds all activations of the stage
at once. Here each layer is a pair of calls instead, and activations live only inside a
call:

      x ──▶ forward 1 ──▶ forward 2 ──▶ forward 3 ──▶ y
      │         │             │
      ▼         ▼             ▼
    backward 1 ◀─ backward 2 ◀─ backward 3 ◀── dy

`backward n` takes the input of layer n, runs the layer again, and differentiates it.
A call starts when all its arguments are there, the incoming gradient included, so at
any time one layer's activations exist, and otherwise the inputs of layers.

`tf.recompute_grad` promises the same, but ties the recomputation to the incoming
gradient by adding a zero computed from it, which TensorFlow's graph optimizer folds
away; it then finds forward and recomputation to be equal and merges them, and every
activation stays. A function that is not inlined it leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import seams

Tensors = Sequence[tf.Tensor]


def rematerialised(
    layer: keras.layers.Layer, x: tf.Tensor, *, jit_compile: bool
) -> tf.Tensor:
    """Applies a layer so that its gradient recomputes it from its input.

    To be called in a `StatelessScope` that maps all variables of the layer, which is
    updated as by the layer itself: with assignments, losses and masks.

    Args:
        layer: A built layer.
        x: Its input.
        jit_compile: Whether XLA compiles the layer's two functions.
    """
    scope = seams.current_stateless_scope()
    weights, state = layer.trainable_variables, layer.non_trainable_variables
    mask = seams.get_mask(x)
    constants = [scope.get_current_value(variable) for variable in state]
    constants += [] if mask is None else [mask]
    options: dict[str, Any] = {
        "autograph": False,
        "jit_compile": jit_compile or None,
        "experimental_attributes": {"_noinline": True},
    }

    def apply(x: tf.Tensor, values: Tensors, constants: Tensors) -> Any:
        for mask in constants[len(state) :]:
            seams.set_mask(x, mask)
        mapping = zip([*weights, *state], [*values, *constants], strict=False)
        with keras.StatelessScope(mapping, collect_losses=True) as inner:
            y = layer(x)
        new_state = [inner.get_current_value(variable) for variable in state]
        return [y, *inner.losses], new_state, seams.get_mask(y)

    def differentiate(
        x: tf.Tensor, values: Tensors, constants: Tensors, grads: Tensors
    ) -> list[tf.Tensor | None]:
        sources = [x, *values]
        with tf.GradientTape() as tape:
            tape.watch([source for source in sources if source.dtype.is_floating])
            results, _, _ = apply(x, values, constants)
        gradients = tape.gradient(results, sources, output_gradients=list(grads))
        return [None if g is None else tf.convert_to_tensor(g) for g in gradients]

    forward = tf.function(apply, **options)
    backward = tf.function(differentiate, **options)
    aside: list[Any] = []

    @tf.custom_gradient
    def recomputed(x: tf.Tensor, *values: tf.Tensor) -> Any:
        results, *others = forward(x, values, constants)
        aside.extend(others)
        return results, lambda *grads: backward(x, values, constants, grads)

    y, *losses = recomputed(x, *(scope.get_current_value(v) for v in weights))
    new_state, new_mask = aside
    for variable, value in zip(state, new_state, strict=True):
        scope.add_update((variable, value))
    for loss in losses:
        scope.add_loss(loss)
    if new_mask is not None:
        seams.set_mask(y, new_mask)
    return y
