"""A plain copy of a model: on one device, in float32, with nothing left to wait for.

What is exported, or quantized after training, is never the user's model but a copy:

    PipelinedModel            its layers, unpipelined
    PipelinedLayer inside     likewise
    mixed_float16, ...        float32
    delay=200                 delay=0: a graph with nothing conditional in it

Weights and ranges have the same values. The configuration is rewritten, as Keras saves
it, and a model made from that.
"""

from __future__ import annotations

from typing import Any

import keras

from tfgpipe._compat import keras_internals
from tfgpipe.capture import dtype_policies
from tfgpipe.pipelined_layer import PipelinedLayer
from tfgpipe.pipelined_model import PipelinedModel
from tfgpipe.quantization.wrapper import QUANTIZING

_DELAYED = tuple(kind.__name__ for kind in QUANTIZING)
_POLICIES = ("DTypePolicy", "FloatDTypePolicy", "DTypePolicyMap")


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
    unpipelined = without_pipelines(model)
    serialized = _rewritten(keras.saving.serialize_keras_object(unpipelined))
    serialized.pop("compile_config", None)
    if unpipelined is not model:
        serialized = _of_any_batch(serialized)
    with dtype_policies.made_under("float32"):
        # What was made in this process may hold lambdas.
        copy = keras.saving.deserialize_keras_object(
            serialized,
            custom_objects=_classes(unpipelined),
            safe_mode=False,
        )
    for source, target in zip(unpipelined.weights, copy.weights, strict=True):
        target.assign(source)
    return copy


def _classes(model: keras.Model) -> dict[str, type]:
    """Returns the classes of a model's own layers, under the names Keras saves.

    Raises:
        ValueError: If two of them have one name.
    """
    classes: dict[str, type] = {}
    for layer in keras_internals.inner_layers(model):
        kind = type(layer)
        if kind.__module__.startswith("keras."):
            continue
        name = keras.saving.get_registered_name(kind)
        other = classes.setdefault(name, kind)
        if other is not kind:
            raise ValueError(
                "What is exported is made again from its configuration, in which "
                "layers are known by the names of their classes. Received two classes "
                f"'{name}', {other.__module__}.{other.__qualname__} and "
                f"{kind.__module__}.{kind.__qualname__}. Rename one, or register it "
                "with `keras.saving.register_keras_serializable(package=...)`."
            )
    return classes


def inputs_of(model: keras.Model) -> Any:
    """Returns what a Functional or Sequential model takes, in its structure."""
    graph = keras_internals.graph_of(model)
    assert graph is not None  # What `plain_copy` returns is one of the two.
    return graph.input


def without_pipelines(model: keras.Model) -> keras.Model:
    """Returns a model of the same layers, weights shared, none of them in a pipeline.

    The model itself if that is so already.
    """
    if isinstance(model, PipelinedModel):
        return model.unpipelined()
    inner = keras_internals.inner_layers(model)
    if not any(isinstance(x, PipelinedLayer | PipelinedModel) for x in inner):
        return model
    if isinstance(model, keras.Sequential):
        entry = keras.Input(batch_shape=model.input_shape, dtype=model.inputs[0].dtype)
        layers = [_without(layer) for layer in model.layers]
        return keras.Sequential([entry, *layers], name=model.name)
    return keras.models.clone_model(
        model, clone_function=_without, call_function=_called
    )


def _without(layer: Any) -> Any:
    """Returns a layer, a pipeline or one that holds pipelines as a plain model."""
    if isinstance(layer, PipelinedLayer | PipelinedModel):
        return layer.unpipelined()
    if isinstance(layer, keras.Model):
        return without_pipelines(layer)
    return layer


def _called(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls what stands in for a layer; a pipeline's side inputs are inputs now."""
    sides = kwargs.keys() - {"training", "mask"}
    if sides and keras_internals.graph_of(layer) is not None:
        return layer((args[0], {name: kwargs[name] for name in sides}))
    return layer(*args, **kwargs)


def _check(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"What is exported is a Keras model. Received {model!r} of type "
            f"{type(model).__name__}. Make one of layers: `keras.Sequential(layers)`."
        )
    if not model.built:
        raise ValueError(
            f"A model is exported once it is built. Received '{model.name}', which is "
            "not. Call it on data, or load its weights, first."
        )
    if (
        not isinstance(model, PipelinedModel)
        and keras_internals.graph_of(model) is None
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


def _rewritten(config: Any) -> Any:
    """Returns a configuration with float32 for policies, and nothing delayed."""
    if isinstance(config, dict):
        if config.get("class_name") in _POLICIES:
            return keras.saving.serialize_keras_object(keras.DTypePolicy("float32"))
        changed = {key: _rewritten(value) for key, value in config.items()}
        if config.get("class_name") in _DELAYED:
            changed["config"] = {**changed["config"], "delay": 0}
        return changed
    if isinstance(config, list | tuple):
        return type(config)(_rewritten(value) for value in config)
    return config


def _of_any_batch(config: Any) -> Any:
    """Returns a configuration with inputs of any number of rows.

    A pipeline of a list of layers knows only how many rows it was first called on.
    """
    if isinstance(config, dict):
        changed = {key: _of_any_batch(value) for key, value in config.items()}
        if config.get("class_name") == "InputLayer":
            shape = [None, *config["config"]["batch_shape"][1:]]
            changed["config"] = {**changed["config"], "batch_shape": shape}
        return changed
    if isinstance(config, list | tuple):
        return type(config)(_of_any_batch(value) for value in config)
    return config
