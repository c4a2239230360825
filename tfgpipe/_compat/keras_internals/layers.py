"""Layers inside a layer, with their variables and the signature of their call."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Iterable
from typing import Any

import keras


def inner_layers(layer: Any) -> list[keras.layers.Layer]:
    """Returns a layer and each layer inside it.

    Layers other than models have no public list of the layers inside; operations have
    none inside.
    """
    if not isinstance(layer, keras.layers.Layer):
        return []
    return layer._flatten_layers()


def inner_names(layer: Any) -> list[str]:
    """Returns the names of a layer and of all layers inside it."""
    return [inner.name for inner in inner_layers(layer)] or [layer.name]


def is_trainable(layer: Any) -> tuple[bool, ...]:
    """Returns whether a layer, and each layer inside it, is trainable."""
    return tuple(inner.trainable for inner in inner_layers(layer))


def config_is_complete(layer: Any) -> bool:
    """Returns whether a Keras layer's configuration says all that it computes.

    That holds for all layers and operations in these packages but `Lambda` and those
    that `adapt` to data. Layers around other frameworks' functions are in others.
    """
    module = type(layer).__module__
    others = ("keras.src.layers.core.lambda_layer", "keras.src.layers.preprocessing.")
    if module.startswith(others):
        return False
    return module.startswith(("keras.src.layers.", "keras.src.ops."))


def take_call_arguments_of(wrapper: keras.layers.Layer, layer: Any) -> None:
    """Has Keras bind the arguments of a wrapper's call to those of the layer in it.

    In the constructor Keras inspects the signature of `call`, to find tensors, their
    masks and shapes in a call. `call(self, *args, training=None, **kwargs)`, which
    passes all on, names none, and there is no public hook.
    """
    parameters = list(layer._call_signature.parameters.values())
    if "training" not in layer._call_signature.parameters:
        kind = inspect.Parameter.KEYWORD_ONLY
        num_after = sum(p.kind is p.VAR_KEYWORD for p in parameters)
        training = inspect.Parameter("training", kind, default=None)
        parameters.insert(len(parameters) - num_after, training)
    wrapper._call_signature = inspect.Signature(parameters)
    wrapper.call_signature_parameters = [p.name for p in parameters]
    wrapper._call_has_mask_arg = "mask" in wrapper.call_signature_parameters


def seed_states(layer: Any) -> list[keras.Variable]:
    """Returns the states of the seed generators of a layer, and of those inside it."""
    inner = inner_layers(layer)
    return [generator.state for each in inner for generator in each._seed_generators]


def own_metrics(layer: Any) -> list[keras.Variable]:
    """Returns the variables of the metrics of a layer, and of the layers inside it.

    Not those of the losses and metrics that models inside are compiled with.
    """
    metrics = [metric for inner in inner_layers(layer) for metric in inner._metrics]
    return [variable for metric in metrics for variable in metric.variables]


def mutable_state(layer: Any) -> list[keras.Variable]:
    """Returns the variables of a layer that a training step may change by itself.

    Seeds, metrics, and statistics of layers that are trainable. Keras' public list of
    variables that are not trained holds frozen weights as well.
    """
    inner = [x for x in inner_layers(layer) if x.trainable]
    return [
        *seed_states(layer),
        *own_metrics(layer),
        *(v for x in inner for v in x._non_trainable_variables),
    ]


def layer_metrics(layers: Iterable[keras.layers.Layer]) -> list[keras.metrics.Metric]:
    """Returns the metrics of a model's layers as its `metrics` lists them.

    In the order in which Keras goes through the layers inside, and once for each layer
    that a metric is inside of, but not for models.

    Args:
        layers: The layers of a model, or those of a Sequential to be made.
    """
    found: list[keras.metrics.Metric] = []
    remaining, seen = collections.deque(layers), set()
    while remaining:
        layer = remaining.popleft()
        if id(layer) not in seen:
            seen.add(id(layer))
            remaining.extendleft(layer._layers)
            if not isinstance(layer, keras.Model):
                found += layer.metrics
    return found
