"""Argument checks of a pipeline, with their error messages.

Each check returns the value it was given, or raises an error that says what is wrong,
what was received and what to try.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import keras

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, first_names
from tfgpipe.stage import dedup, normalization


def check_alike(
    first: keras.layers.Layer, layer: keras.layers.Layer, *, stage: int
) -> None:
    """Raises ValueError if built layers are not known to compute the same.

    Args:
        first: The layer in stage 0.
        layer: The one at its place in another stage.
        stage: The index of the other stage.
    """
    structure = dedup.layer_structure(first)
    if structure is None:
        raise ValueError(
            "The stages of an SPMD pipeline compute the same, each with weights of its "
            f"own. Whether they do is not known of layer '{first.name}' of type "
            f"{type(first).__name__}. If layers of this type with equal "
            "`get_config()` compute the same, say so in the class: "
            "`config_is_complete = True`."
        )
    if structure != dedup.layer_structure(layer):
        raise ValueError(
            "The stages of an SPMD pipeline compute the same, each with weights of its "
            f"own. Received '{first.name}' in stage 0 and, at its place in stage "
            f"{stage}, '{layer.name}', which differs in configuration or variables. "
            "Put layers that differ before or behind the pipeline, or use "
            "`tfgpipe.PipelinedModel` under `tfgpipe.PipelineStrategy`."
        )


def check_not_stateful(called: Iterable[Any]) -> None:
    """Raises ValueError for a stateful recurrent layer."""
    for layer in called:
        for inner in keras_internals.layers.inner_layers(layer):
            if isinstance(inner, keras.layers.RNN) and inner.stateful:
                raise ValueError(
                    "A recurrent layer with `stateful=True` continues where the batch "
                    "before ended, and would take one microbatch for the next of "
                    f"another. Received '{inner.name}'. Use `stateful=False` "
                    "and hand its state over as inputs and outputs of the model, or "
                    "keep the layer outside the pipeline."
                )


def check_not_float8(called: Iterable[Any]) -> None:
    """Raises ValueError for float8 layers, whose "gradients" are new values."""
    for layer in called:
        for inner in keras_internals.layers.inner_layers(layer):
            overwritten = [v for v in inner.variables if v.overwrite_with_gradient]
            if inner.quantization_mode == "float8" or overwritten:
                raise ValueError(
                    "Layers of float8 hand their new scales to the optimizer as "
                    "gradients, and a pipeline adds up the gradients of microbatches. "
                    f"Received layer '{inner.name}' of policy "
                    f"{inner.dtype_policy.name!r}. Use 'mixed_bfloat16', or keep the "
                    "layer outside the pipeline."
                )


def warn_of_state_per_microbatch(
    called: Iterable[Any], changed: Iterable[keras.Variable]
) -> None:
    """Warns of variables that are updated once per microbatch, and should not be.

    Batch normalization is not included: `warn_of_batch_norm` warns of it.
    """
    called = list(called)
    norms = [v for norm in normalization.batch_norms(called) for v in norm.variables]
    # Seeds, and metrics, which add up what they see.
    add_up = (
        v
        for layer in called
        for v in (
            *keras_internals.layers.seed_states(layer),
            *keras_internals.layers.own_metrics(layer),
        )
    )
    known = IdentityMap((v, None) for v in (*norms, *add_up))
    names = [v.path for v in changed if v not in known]
    if names:
        warnings.warn(
            "Some layers change variables of their own whenever they are called, and "
            "in a pipeline that is once a microbatch, in order, rather than once a "
            f"step. Received {first_names(names)}. Use `num_microbatches=1`, or change "
            "them outside the pipeline, if that is not meant.",
            stacklevel=2,
        )
