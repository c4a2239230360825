"""Plain copies of a model: unpipelined, in float32, without delayed quantization.

What is exported, or quantized after training, is never the user's model but a copy:

    PipelinedModel            its layers, unpipelined
    PipelinedLayer inside     likewise
    mixed_float16, ...        float32
    delay=200                 delay=0: a graph with nothing conditional in it

Weights and ranges have the same values. The configuration that Keras would save is
rewritten, and the copy is created from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import keras

from tfgpipe._compat import keras_internals
from tfgpipe.capture import dtype_policies
from tfgpipe.pipelined_layer import PipelinedLayer
from tfgpipe.pipelined_model import PipelinedModel
from tfgpipe.quantization.layers import QUANTIZING, quantizing_layers

_QUANTIZING = frozenset(map(keras.saving.get_registered_name, QUANTIZING))
_POLICIES = frozenset({"DTypePolicy", "FloatDTypePolicy", "DTypePolicyMap"})


def plain_copy(model: keras.Model) -> keras.Model:
    """Returns an unpipelined float32 copy of a model, with weights of its own.

    Args:
        model: A built model: a `PipelinedModel`, or a Functional or Sequential one with
            pipelines in it or not.

    Raises:
        TypeError: If it is another model, or none.
        ValueError: If it is not built, Keras has quantized it already, or two classes
            of its layers have one name.
    """
    _check(model)
    unpipelined = _without_pipelines(model)
    any_batch = unpipelined is not model
    classes = _classes(unpipelined)

    def plain(thing: dict[str, Any]) -> dict[str, Any]:
        registered, config = thing.get("registered_name"), thing["config"]
        if registered is None and thing["class_name"] in _POLICIES:
            return keras.saving.serialize_keras_object(keras.DTypePolicy("float32"))
        if registered in _QUANTIZING:
            return {**thing, "config": {**config, "delay": 0}}
        if thing["class_name"] == "InputLayer" and any_batch:
            # A pipeline of a list of layers was built for one size of batch.
            shape = [None, *config["batch_shape"][1:]]
            return {**thing, "config": {**config, "batch_shape": shape}}
        name = _full_name(thing.get("module"), thing["class_name"])
        return {**thing, "registered_name": name} if name in classes else thing

    serialized = _map_config(keras.saving.serialize_keras_object(unpipelined), plain)
    serialized.pop("compile_config", None)
    with dtype_policies.default_policy_scope("float32"):
        # A model of this process is trusted, and may hold lambdas.
        copy = keras.saving.deserialize_keras_object(
            serialized, custom_objects=classes, safe_mode=False
        )
    for source, target in zip(unpipelined.weights, copy.weights, strict=True):
        target.assign(source)
    return copy


def quantize_after_training(
    model: keras.Model, *, mode: Literal["int8", "int4", "float8"] = "int8"
) -> keras.Model:
    """Returns an unpipelined copy of a model, quantized by Keras' `model.quantize`.

    Keras quantizes `Dense`, `EinsumDense` and `Embedding` layers, and leaves others,
    such as convolutions, in floats. Activations get their ranges anew with each call,
    so it takes no data, and what comes out is a Keras model, not a file.

    Example:

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> copy = tfgpipe.quantization.quantize_after_training(model)
    >>> copy.layers[0].dtype_policy.name, model.layers[0].dtype_policy.name
    ('int8_from_float32', 'float32')

    Args:
        model: A built model, pipelined or not, that is not quantized.
        mode: As in `keras.Model.quantize`.

    Raises:
        TypeError: If it is no Functional or Sequential model, or a pipeline of it.
        ValueError: If it is not built, or is quantized already.
    """
    copy = plain_copy(model)
    for layer in quantizing_layers(copy):
        raise ValueError(
            "Quantization after training is for a model trained without. Received "
            f"'{model.name}' with layer '{layer.name}', which quantizes already. "
            "Export it with `tfgpipe.export_int8`, or quantize what it was before."
        )
    with warnings.catch_warnings():
        # For each layer that Keras leaves as it is: the docstring tells which.
        warnings.filterwarnings("ignore", message=r".*`quantize` method")
        copy.quantize(mode)
    return copy


def _map_config(
    config: Any, function: Callable[[dict[str, Any]], dict[str, Any]]
) -> Any:
    """Returns a serialized configuration, its objects replaced from the inside out."""
    if isinstance(config, dict):
        mapped = {key: _map_config(value, function) for key, value in config.items()}
        return function(mapped) if {"class_name", "config"} <= mapped.keys() else mapped
    if isinstance(config, list | tuple):
        return type(config)(_map_config(value, function) for value in config)
    return config


def _classes(model: keras.Model) -> dict[str, type]:
    """Returns the classes of a model's layers that are neither Keras' nor registered.

    Raises:
        ValueError: If two of them have one name.
    """
    classes: dict[str, type] = {}
    for kind in map(type, keras_internals.layers.inner_layers(model)):
        name = keras.saving.get_registered_name(kind)
        if kind.__module__.startswith("keras.") or name != kind.__name__:
            continue
        other = classes.setdefault(_full_name(kind.__module__, name), kind)
        if other is not kind:
            raise ValueError(
                "What is exported is copied by its configuration, in which layers are "
                "known by the names of their classes. Received two classes "
                f"'{name}', {other.__module__}.{other.__qualname__} and "
                f"{kind.__module__}.{kind.__qualname__}. Rename one, or register it "
                "with `keras.saving.register_keras_serializable(package=...)`."
            )
    return classes


def _full_name(module: Any, name: str) -> str:
    return f"{module}>{name}"


def _without_pipelines(layer: Any) -> Any:
    """Returns a layer or model of the same layers, weights shared, without pipelines.

    The layer itself if there are none in it.
    """
    if isinstance(layer, PipelinedLayer | PipelinedModel):
        return layer.unpipelined()
    inner = keras_internals.layers.inner_layers(layer)
    has_pipelines = any(isinstance(x, PipelinedLayer | PipelinedModel) for x in inner)
    if not (has_pipelines and isinstance(layer, keras.Model)):
        return layer
    if isinstance(layer, keras.Sequential):
        entry = keras.Input(batch_shape=layer.input_shape, dtype=layer.inputs[0].dtype)
        layers = map(_without_pipelines, layer.layers)
        return keras.Sequential([entry, *layers], name=layer.name)
    return keras.models.clone_model(
        layer, clone_function=_without_pipelines, call_function=_call_without_pipeline
    )


def _call_without_pipeline(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer's replacement; the side inputs of a pipeline are inputs of it."""
    sides = kwargs.keys() - {"training", "mask"}
    if sides and keras_internals.functional.functional_graph(layer) is not None:
        return layer((args[0], {name: kwargs[name] for name in sides}))
    return layer(*args, **kwargs)


def _check(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"What is exported is a Keras model. Received {model!r} of type "
            f"{type(model).__name__}. Build one of layers: `keras.Sequential(layers)`."
        )
    if not model.built:
        raise ValueError(
            f"A model is exported once it is built. Received '{model.name}', which is "
            "not. Call it on data, or load its weights, first."
        )
    if (
        not isinstance(model, PipelinedModel)
        and keras_internals.functional.functional_graph(model) is None
    ):
        raise TypeError(
            "What is exported is a Functional or Sequential model, whose calls Keras "
            f"knows, or a pipeline of one. Received '{model.name}' of type "
            f"{type(model).__name__}, which has a `call` of its own. Write it with "
            "`keras.Model(inputs, outputs)`."
        )
    dtype_policies.check_unquantized(
        model,
        purpose="to be exported",
        remedy="Export the model as it was before `quantize`.",
    )
