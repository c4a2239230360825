"""The source model: a list of layers or a Keras model, as the user gave it."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, unique
from tfgpipe.capture import input_checks, tracer

Specs = Mapping[str, keras.KerasTensor]


class SourceModel(abc.ABC):
    """The model that the pipeline must be equivalent to.

    Attributes:
        layers: The layers whose variables are its own.
        listed_layers: The layers of the list or the model in order, inputs included.
        inputs: Its symbolic inputs, if they are known before it is called.
    """

    layers: tuple[keras.layers.Layer, ...]
    listed_layers: Sequence[keras.layers.Layer]
    inputs: Any = None

    @property
    @abc.abstractmethod
    def calls(self) -> Sequence[Any]:
        """The layers and operations in the order they are called, some maybe twice."""

    @property
    @abc.abstractmethod
    def opaque_calls(self) -> Mapping[int, str]:
        """As `CapturedModel.opaque_calls`."""

    @abc.abstractmethod
    def capture(self, inputs: Any, side_inputs: Specs) -> tracer.CapturedModel:
        """Returns its calls, building layers that are not yet built.

        Args:
            inputs: Symbolic tensors in any structure.
            side_inputs: Symbolic tensors by name, beside the inputs.
        """

    @abc.abstractmethod
    def flatten_inputs(
        self,
        captured: tracer.CapturedModel,
        inputs: Any,
        side_inputs: Mapping[str, tf.Tensor],
    ) -> dict[str, tf.Tensor | None]:
        """Returns tensors, by name, in the order of the captured model's inputs."""

    @abc.abstractmethod
    def output_spec(self, inputs: Any, side_inputs: Specs) -> Any:
        """Returns symbolic outputs for symbolic inputs."""

    @abc.abstractmethod
    def unpipelined(self, inputs: Any, side_inputs: Specs) -> keras.Model:
        """Returns a plain Keras model of the same layers."""

    @abc.abstractmethod
    def symbolic_io(self, captured: tracer.CapturedModel) -> tuple[Any, Any]:
        """Returns the symbolic inputs and outputs of its capture, each nested."""

    @property
    def named_layers(self) -> dict[str, Any]:
        """The layers by name: those that it lists, then those inside its models."""
        named: dict[str, Any] = {}
        for layer in (*self.listed_layers, *self.calls):
            if isinstance(layer, keras.layers.Layer):
                named.setdefault(layer.name, layer)
        return named

    @abc.abstractmethod
    def get_config(self) -> Any:
        """Returns the configuration that `from_config` takes."""

    def describe_location(self, name: str) -> str:
        """Returns the place of a layer that no call is of, for an error message."""
        for layer in self.calls:
            if name in keras_internals.layers.inner_names(layer):
                return (
                    f"is inside layer '{layer.name}', where no stage can end: only "
                    "models whose calls Keras knows are inlined. End it after "
                    f"'{layer.name}', or make a Functional model of it."
                )
        names = ", ".join(layer.name for layer in self.calls[:8])
        return f"no layer has. The layers are {names}, ... Use one of their names."


class LayerListSource(SourceModel):
    """Layers that each take the outputs of the one before."""

    def __init__(self, layers: Sequence[keras.layers.Layer]) -> None:
        self.layers = self.listed_layers = tuple(check_layer_list(layers))

    @property
    def calls(self) -> Sequence[Any]:
        """The layers."""
        return self.layers

    @property
    def opaque_calls(self) -> Mapping[int, str]:
        """As `CapturedModel.opaque_calls`."""
        return tracer.opaque_in_list(self.layers)

    def capture(self, inputs: Any, side_inputs: Specs) -> tracer.CapturedModel:
        """Returns the calls of the layers one after another."""
        input_checks.check_side_inputs_are_used(self.layers, side_inputs)
        inputs, side_inputs = _model_inputs((inputs, dict(side_inputs)))
        return tracer.capture_layers(self.layers, inputs, side_inputs)

    def flatten_inputs(
        self,
        captured: tracer.CapturedModel,
        inputs: Any,
        side_inputs: Mapping[str, tf.Tensor],
    ) -> dict[str, tf.Tensor | None]:
        """Returns the tensors of `inputs`, then those of `side_inputs`."""
        names = captured.side_inputs
        input_checks.check_structure(captured.inputs, inputs)
        input_checks.check_side_inputs(names, side_inputs)
        pairs = zip(*map(keras.tree.flatten, (captured.inputs, inputs)), strict=True)
        tensors = [x for known, x in pairs if known is not None]
        return name_inputs(tensors, {name: side_inputs.get(name) for name in names})

    def output_spec(self, inputs: Any, side_inputs: Specs) -> Any:
        """Returns the outputs of the last layer."""
        return tracer.capture_layers(self.layers, inputs, side_inputs).outputs()

    def unpipelined(self, inputs: Any, side_inputs: Specs) -> keras.Model:
        """Returns a Sequential; with several inputs, a Functional model."""
        inputs, side_inputs = _model_inputs((inputs, dict(side_inputs)))
        if isinstance(inputs, keras.KerasTensor) and not side_inputs:
            return keras.Sequential([inputs, *self.layers])
        outputs = self.output_spec(inputs, side_inputs)
        return keras.Model((inputs, side_inputs) if side_inputs else inputs, outputs)

    def symbolic_io(self, captured: tracer.CapturedModel) -> tuple[Any, Any]:
        """Returns the inputs of the first layer and the outputs of the last."""
        return captured.inputs, captured.outputs()

    def get_config(self) -> Any:
        """Returns each layer's configuration once, and the order of their calls."""
        indices = IdentityMap((x, i) for i, x in enumerate(unique(self.layers)))
        configs = [keras.saving.serialize_keras_object(layer) for layer in indices]
        if len(configs) == len(self.layers):
            return configs
        return {"layers": configs, "order": [indices[x] for x in self.layers]}


class FunctionalSource(SourceModel):
    """A Functional model, or a Sequential one that is built."""

    def __init__(self, model: keras.Model, graph: keras.Model) -> None:
        self._model = model
        self._graph = graph
        self._captured = tracer.capture_functional(graph)
        self.inputs = graph.input
        self.layers = tuple(
            x for x in model.layers if not isinstance(x, keras.layers.InputLayer)
        )
        self.listed_layers = model.layers

    @property
    def calls(self) -> Sequence[Any]:
        """The layers and operations in the order Keras runs them."""
        return [call.layer for call in self._captured.graph.calls]

    @property
    def opaque_calls(self) -> Mapping[int, str]:
        """As `CapturedModel.opaque_calls`."""
        return self._captured.opaque_calls

    def capture(
        self, inputs: Any = None, side_inputs: Specs | None = None
    ) -> tracer.CapturedModel:
        """Returns the calls that the model remembers."""
        input_checks.check_side_inputs((), side_inputs or {})
        return self._captured

    def flatten_inputs(
        self,
        captured: tracer.CapturedModel,
        inputs: Any,
        side_inputs: Mapping[str, tf.Tensor],
    ) -> dict[str, tf.Tensor | None]:
        """Returns the inputs as Keras feeds them to the model."""
        input_checks.check_side_inputs((), side_inputs)
        tensors = keras_internals.functional.standardize_inputs(self._graph, inputs)
        if len(tensors) != len(self._graph.inputs):
            input_checks.check_structure(self._graph.input, inputs)
        return {x.name: y for x, y in zip(self._graph.inputs, tensors, strict=True)}

    def output_spec(self, inputs: Any, side_inputs: Specs) -> Any:
        """Returns the outputs of the model."""
        return tracer.unpack_single(self._model.compute_output_spec(inputs))

    def unpipelined(self, inputs: Any, side_inputs: Specs) -> keras.Model:
        """Returns the model itself."""
        return self._model

    def symbolic_io(self, captured: tracer.CapturedModel) -> tuple[Any, Any]:
        """Returns the inputs and outputs of the model."""
        return self._graph.input, self._graph.output

    def get_config(self) -> Any:
        """Returns the model's configuration."""
        return keras.saving.serialize_keras_object(self._model)


def make_source(layers: Any) -> SourceModel:
    """Returns the source model for the first argument of a `PipelinedLayer`."""
    graph = keras_internals.functional.functional_graph(layers)
    if graph is not None:
        return FunctionalSource(layers, graph)
    sequential = isinstance(layers, keras.Sequential)
    return LayerListSource(layers.layers if sequential else layers)


def from_config(config: Any) -> Any:
    """Returns layers, or a model, from what `get_config` returned."""
    if isinstance(config, list | tuple):
        return [keras.saving.deserialize_keras_object(layer) for layer in config]
    if "order" in config:
        layers = from_config(config["layers"])
        return [layers[i] for i in config["order"]]
    return keras.saving.deserialize_keras_object(config)


def name_inputs(
    inputs: Sequence[tf.Tensor | None], side_inputs: Mapping[str, tf.Tensor | None]
) -> dict[str, tf.Tensor | None]:
    """Returns inputs by the names that error messages use."""
    return {**{f"input {i}": x for i, x in enumerate(inputs)}, **side_inputs}


def contains_only_tensors(structure: Any) -> bool:
    """Returns whether a structure holds tensors, arrays and None alone."""
    leaves = keras.tree.flatten(structure)
    return all(
        x is None
        or keras.ops.is_tensor(x)
        or isinstance(x, np.ndarray | keras.KerasTensor)
        for x in leaves
    )


def to_symbolic(tensors: Any) -> Any:
    """Replaces tensors by their shapes and dtypes; leaves everything else."""
    return keras.tree.map_structure(
        lambda x: (
            keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))
            if x is not None and contains_only_tensors(x)
            else x
        ),
        tensors,
    )


def copy_unbuilt(layers: Any) -> Any:
    """Replaces layers that are not built by copies, which can then be built."""
    if isinstance(layers, keras.Sequential) and not layers.built:
        layers = layers.layers
    if isinstance(layers, keras.Model) or not isinstance(layers, list | tuple):
        return layers
    copies = IdentityMap(
        (x, x if x.built else type(x).from_config(x.get_config()))
        for x in unique(check_layer_list(layers))
    )
    return [copies[layer] for layer in layers]


def _model_inputs(specs: Any) -> Any:
    """Returns inputs of a model, of the shapes and types of symbolic tensors."""
    return keras.tree.map_structure(
        lambda x: (
            None if x is None else keras.Input(batch_shape=x.shape, dtype=x.dtype)
        ),
        specs,
    )


def check_layer_list(
    layers: Sequence[keras.layers.Layer],
) -> Sequence[keras.layers.Layer]:
    """Returns `layers` if it is a non-empty list of Keras layers."""
    if isinstance(layers, keras.Model):
        raise TypeError(
            "A pipeline partitions Functional and Sequential models, whose calls Keras "
            f"knows. Received '{layers.name}' of type {type(layers).__name__}, which "
            "has a `call` of its own. Record it on a mini-batch, "
            "`tfgpipe.functional(model, x)`, or give `sample=x` to `tfgpipe.pipeline`."
        )
    if not isinstance(layers, Sequence) or not layers:
        raise ValueError(
            "`layers` must be a non-empty list of Keras layers, or a Keras model. "
            f"Received {layers!r}."
        )
    for position, layer in enumerate(layers):
        if not isinstance(layer, keras.layers.Layer):
            raise TypeError(
                "`layers` must hold Keras layers. Received at position "
                f"{position}: {layer!r} of type {type(layer).__name__}. Wrap a "
                "function as `keras.layers.Lambda(function)`."
            )
    return layers
