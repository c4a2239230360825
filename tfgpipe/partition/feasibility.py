"""Which numbers of stages a model can be partitioned into."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfgpipe._compat import keras_internals
from tfgpipe._util import argument_checks, first_names, unique
from tfgpipe.costs import profiler


def check_feasible(
    called: Sequence[Any], num_stages: int | None, opaque: Mapping[int, str]
) -> None:
    """Raises ValueError if so many stages cannot be made of these calls."""
    if num_stages is not None:
        argument_checks.check_count("num_stages", num_stages)
    possible = sum(profiler.may_start(called))
    if num_stages is None or num_stages <= possible:
        return
    names = [layer.name for layer in called]
    ranges = sorted(
        profiler.shared_state_ranges(called), key=lambda span: span[1] - span[2]
    )
    together = "".join(
        f" All calls that use '{variable.path}', which a step changes, are in one "
        f"stage: '{names[first]}' to '{names[last]}'. A layer of its own in each place "
        "would let them be apart."
        for variable, first, last in ranges[:1]
    )
    eager = (
        " No call is of a layer: layers that were called on tensors which no "
        "`keras.Input` leads to ran when the model was made, and are no part of it. "
        "Call them in a layer, or on an input of the model."
    ) * (not any(isinstance(layer, keras.layers.Layer) for layer in called))
    raise ValueError(
        "Every stage holds at least one call of a layer. Received num_stages="
        f"{num_stages} for a model of {len(called)} calls, {first_names(names)}, "
        f"of which at most {possible} stages can be made.{together}"
        f"{_describe_largest_opaque(called, opaque)}{eager} Use "
        f"num_stages={possible}{' or fewer' * (possible > 1)}."
    )


def _describe_largest_opaque(called: Sequence[Any], opaque: Mapping[int, str]) -> str:
    """Says which call hides most layers, and why it does."""
    if not opaque:
        return ""
    sizes = {i: (_num_parameters(called[i]), _num_leaves(called[i])) for i in opaque}
    largest = max(opaque, key=sizes.__getitem__)
    layer, (num_parameters, num_leaves) = called[largest], sizes[largest]
    total = sum(map(_num_parameters, unique(called)))
    share = f" and {num_parameters / total:.0%} of the parameters" if total else ""
    return (
        f" '{layer.name}' ({type(layer).__name__}) holds {num_leaves} layers"
        f"{share} and is one call, since it is {opaque[largest]}: only models are "
        "inlined that do nothing but run the calls that Keras knows. To split it, "
        "record its `call` by `tfgpipe.functional(model, num_calls=...)`, if that "
        "consists of layers and `keras.ops`, give its layers as a list, or write it as "
        "a Functional model."
    )


def _num_leaves(layer: Any) -> int:
    """Returns the number of layers inside that have none inside, inputs not counted."""
    inner = keras_internals.layers.inner_layers(layer)
    leaves = [x for x in inner if len(keras_internals.layers.inner_layers(x)) == 1]
    return sum(not isinstance(x, keras.layers.InputLayer) for x in leaves)


def _num_parameters(layer: Any) -> int:
    return sum(math.prod(v.shape) for v in getattr(layer, "weights", ()))
