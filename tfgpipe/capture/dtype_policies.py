"""Dtype policies of the layers inside a pipeline.

Keras gives a layer without `dtype` its global policy, the object itself. A pipeline's
policy takes its place: layers that have the global policy get the pipeline's, and
layers that these create in `build` are created under it. A layer with a policy of its
own keeps it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfgpipe._compat import keras_internals
from tfgpipe._util import unique


def apply_policy(
    dtype: Any, layers: keras.Model | Sequence[keras.layers.Layer]
) -> None:
    """Gives layers, and those inside them, the policy of the pipeline they are in.

    Args:
        dtype: A dtype or dtype policy as Keras takes them, or None to change nothing.
        layers: The layers, or a model of them.

    Raises:
        ValueError: If weights would be integers, or types would have to change that are
            fixed: of a Functional model's tensors, or of weights.
    """
    if dtype is None:
        return
    policy = keras.dtype_policies.get(dtype)
    if keras.backend.is_int_dtype(policy.variable_dtype):
        raise ValueError(
            "`dtype` is the type of weights, of which Keras draws and trains no "
            f"integers. Received dtype={policy.name!r}. Leave it out, and give single "
            "layers `dtype=` that have no weights."
        )
    roots = [layers] if isinstance(layers, keras.Model) else layers
    changing = []
    for layer in unique(
        x for y in roots for x in keras_internals.layers.inner_layers(y)
    ):
        if keras_internals.functional.functional_graph(layer) is not None:
            _check_graph(policy, layer)
        elif _accepts_policy(policy, layer):
            changing.append(layer)
    for layer in changing:
        _check_weights(policy, layer)
    for layer in changing:
        layer.dtype_policy = policy


def check_unquantized(layer: keras.layers.Layer, *, purpose: str, remedy: str) -> None:
    """Raises ValueError if Keras has quantized a layer, or one inside it.

    Args:
        layer: The layer, or a model.
        purpose: Its purpose, in the error.
        remedy: A sentence on how to mend it, in the error.
    """
    for inner in keras_internals.layers.inner_layers(layer):
        policy = inner.dtype_policy
        if policy.quantization_mode is not None:
            raise ValueError(
                "Layers compute in float32, float16 or bfloat16, or a mixture, "
                f"{purpose}. Received layer '{inner.name}' with the dtype policy "
                f"'{policy.name}', in which Keras has quantized it. {remedy}"
            )


@contextlib.contextmanager
def default_policy_scope(dtype: Any) -> Iterator[None]:
    """Gives layers made inside without a policy this one, unless it is None."""
    if dtype is None:
        yield
        return
    outer = keras.config.dtype_policy()
    keras.config.set_dtype_policy(keras.dtype_policies.get(dtype))
    try:
        yield
    finally:
        keras.config.set_dtype_policy(outer)


def _accepts_policy(policy: Any, layer: keras.layers.Layer) -> bool:
    """Returns whether a layer has no policy of its own, and this is a new one."""
    own = layer.dtype_policy
    return own is keras.config.dtype_policy() and own != policy


def _check_graph(policy: Any, model: keras.Model) -> None:
    for layer in model.layers:
        if not isinstance(layer, keras.layers.InputLayer) and _accepts_policy(
            policy, layer
        ):
            raise ValueError(
                "The tensors of a Functional model, or of a Sequential one that is "
                "built, have their types from when it was made. Received "
                f"dtype={policy.name!r} and model '{model.name}', whose layer "
                f"'{layer.name}' is of {layer.dtype_policy.name!r}. Make the model "
                f"under `keras.config.set_dtype_policy({policy.name!r})`, or give its "
                "layers `dtype=`."
            )


def _check_weights(policy: Any, layer: keras.layers.Layer) -> None:
    stored = layer.variable_dtype
    has_weights = any(v.dtype == stored for v in layer.variables)
    if has_weights and policy.variable_dtype != stored:
        raise ValueError(
            "Weights keep the type that they were made with. Received "
            f"dtype={policy.name!r}, whose weights are {policy.variable_dtype}, and "
            f"layer '{layer.name}', which is built with weights of {stored}. Give the "
            "pipeline layers that are not built yet, or leave `dtype` out."
        )
