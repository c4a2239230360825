"""Quantized copies of models and lists of layers.

The user's model stays as it is. The result is a copy, with the same weights, each layer
in a wrapper of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import keras

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, argument_checks
from tfgpipe.capture import Call, source_model, tracer
from tfgpipe.pipelined_layer import PipelinedLayer
from tfgpipe.pipelined_model import PipelinedModel
from tfgpipe.quantization.config import (
    NOTHING,
    QuantizeAnnotation,
    QuantizeConfig,
    without_annotation,
)
from tfgpipe.quantization.fake_quant import QuantSchedule, RangeUpdate
from tfgpipe.quantization.layers import FakeQuantize, QuantizeWrapper, check_unquantized
from tfgpipe.quantization.scheme import Scheme, configs_of, default_8bit

Which = Literal["all", "annotated"]
# Layers that look for certain values in their inputs, which rounding would change.
_COMPARES_VALUES = (keras.layers.Embedding, keras.layers.Masking)
Quantizable: TypeAlias = keras.Model | Sequence[keras.layers.Layer]


def apply(
    model_or_layers: Quantizable,
    *,
    scheme: Scheme | None = None,
    which: Which = "all",
    quantize_inputs: bool = True,
    range_update: RangeUpdate = "per_step",
    delay: int = 0,
    freeze_after: int | None = None,
) -> Any:
    """Returns a copy of a model, or of layers, that trains as it will run in 8 bits.

    Weights are copied. Compile and fit the result like any model, in a pipeline or not,
    and have `tfgpipe.export_int8` write it.

    Example:

    >>> layers = [keras.layers.Dense(8, activation="relu") for _ in range(3)]
    >>> pipelined = tfgpipe.PipelinedLayer(
    ...     tfgpipe.quantization.apply(layers), num_stages=2, num_microbatches=4
    ... )
    >>> pipelined(np.ones((8, 8), "float32")).shape
    TensorShape([8, 8])

    Args:
        model_or_layers: A Functional or Sequential model, or a list of layers, with
            models among them.
        scheme: The rules. Defaults to `default_8bit()`.
        which: `"all"` layers, or those that are `"annotated"`.
        quantize_inputs: True to quantize inputs as well, as a model that is to run in
            integers alone needs.
        range_update: As in `QuantizeWrapper`.
        delay: Steps before quantization starts, as in `QuantizeWrapper`.
        freeze_after: Step after which ranges are frozen, as in `QuantizeWrapper`.

    Raises:
        TypeError: If it is neither a model whose calls Keras knows nor layers.
        ValueError: If a layer has no rule, is quantized already, or is pipelined.
    """
    argument_checks.check_choice("which", which, ("all", "annotated"))
    if scheme is not None:
        hint = " Make one: `tfgpipe.quantization.default_8bit()`."
        argument_checks.check_instance("scheme", scheme, Scheme, hint=hint)
    schedule = QuantSchedule(
        range_update=range_update, delay=delay, freeze_after=freeze_after
    )
    copier = _Copier(scheme or default_8bit(), which, schedule)
    if keras_internals.functional.functional_graph(model_or_layers) is not None:
        return copier.model(model_or_layers, quantize_inputs=quantize_inputs)
    if isinstance(model_or_layers, keras.Sequential):
        copies = copier.layers(model_or_layers.layers, quantize_inputs=quantize_inputs)
        return keras.Sequential(copies, name=model_or_layers.name)
    layers = source_model.check_layer_list(model_or_layers)
    return copier.layers(layers, quantize_inputs=quantize_inputs)


class _Copier:
    """Creates quantized copies of layers, one of each, and of models of them."""

    def __init__(self, scheme: Scheme, which: Which, schedule: QuantSchedule) -> None:
        self._scheme = scheme
        self._which = which
        self._schedule = schedule.get_config()
        self._configs: IdentityMap[keras.layers.Layer, QuantizeConfig] = IdentityMap()
        self._copies: IdentityMap[Any, Any] = IdentityMap()
        self._models: IdentityMap[keras.Model, keras.Model] = IdentityMap()

    def layers(
        self, layers: Sequence[keras.layers.Layer], *, quantize_inputs: bool
    ) -> list[keras.layers.Layer]:
        """Returns quantized copies of layers, and of models among them."""
        calls: list[Call] = []
        for layer in layers:
            # Values of two models have ids of their own.
            first = 1 + max((n for call in calls for n in call.output_ids), default=0)
            graph = keras_internals.functional.functional_graph(layer)
            if graph is None:
                before = calls[-1].output_ids if calls else (0,)
                calls.append(Call(layer, (), {}, before, (first,)))
            else:
                calls += _renumbered(
                    tracer.capture_functional(graph).graph.calls, first
                )
        self._configure(calls, calls[-1].output_ids)
        copies = [self._copy(layer) for layer in layers]
        for old, new in self._copies.items():
            if old.built and not new.built:
                new.build_from_config(old.get_build_config())
        self._copy_weights()
        quantizes = quantize_inputs and _takes_rounded(calls[0])
        return [*(self._input_layers() if quantizes else []), *copies]

    def model(self, model: keras.Model, *, quantize_inputs: bool) -> keras.Model:
        """Returns a quantized copy of a model, not compiled."""
        graph = tracer.capture_functional(
            keras_internals.functional.functional_graph(model)
        ).graph
        self._configure(graph.calls, graph.output_ids)
        quantized = [
            quantize_inputs
            and all(_takes_rounded(call) for call in graph.calls if n in call.input_ids)
            for n in graph.input_ids
        ]
        copy = self._copy_model(model, quantized)
        self._copy_weights()
        return copy

    def _configure(self, calls: Sequence[Call], outputs: Sequence[int]) -> None:
        """Finds the configuration of each layer."""
        annotated: IdentityMap[keras.layers.Layer, QuantizeConfig] = IdentityMap()
        for layer in (call.layer for call in calls):
            if isinstance(layer, PipelinedLayer | PipelinedModel):
                raise ValueError(
                    "Layers are quantized before they are pipelined. Received "
                    f"'{layer.name}' of type {type(layer).__name__}. Pipeline what "
                    "`tfgpipe.quantization.apply` returns for its layers, or for its "
                    "`unpipelined()` model."
                )
            check_unquantized(layer)
            if isinstance(layer, QuantizeAnnotation):
                if layer.config is not None:
                    annotated[layer.layer] = layer.config
            elif self._which == "annotated":
                annotated[layer] = NOTHING
        bare = [
            dataclasses.replace(call, layer=without_annotation(call.layer))
            for call in calls
        ]
        self._configs = configs_of(bare, outputs, self._scheme, annotated)

    def _copy(self, layer: Any) -> Any:
        """Returns the copy of a layer, or of a model among layers."""
        if keras_internals.functional.functional_graph(layer) is not None:
            if layer not in self._models:
                # The inputs of an inner model are quantized where they are computed.
                unquantized = [False] * len(layer.inputs)
                self._models[layer] = self._copy_model(layer, unquantized)
            return self._models[layer]
        layer = without_annotation(layer)
        if not isinstance(layer, keras.layers.Layer):
            return layer
        if layer not in self._copies:
            copy = type(layer).from_config(layer.get_config())
            if isinstance(layer, keras.layers.InputLayer):
                return copy
            if self._configs[layer] != NOTHING:
                copy = QuantizeWrapper(copy, self._configs[layer], **self._schedule)
            self._copies[layer] = copy
        return self._copies[layer]

    def _copy_model(self, model: keras.Model, quantized: Sequence[bool]) -> keras.Model:
        """Returns the copy of a model, with those inputs quantized that are floats."""
        if isinstance(model, keras.Sequential):
            shape, dtype = model.input_shape, model.inputs[0].dtype
            inputs = keras.Input(batch_shape=shape, dtype=dtype)
            quantizes = quantized[0] and keras.backend.is_float_dtype(dtype)
            first = self._input_layers() if quantizes else []
            copies = [self._copy(layer) for layer in model.layers]
            return keras.Sequential([inputs, *first, *copies], name=model.name)
        inputs = keras.tree.map_structure(
            lambda x: keras.Input(batch_shape=x.shape, dtype=x.dtype, name=x.name),
            model.input,
        )
        replacements = IdentityMap(
            (x, layer(x))
            for x, quantizes in zip(keras.tree.flatten(inputs), quantized, strict=True)
            if quantizes and keras.backend.is_float_dtype(x.dtype)
            for layer in self._input_layers()
        )

        def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = keras.tree.map_structure(
                lambda x: replacements.get(x, x), (args, kwargs)
            )
            outputs = operation(*args, **kwargs)
            is_layer = isinstance(operation, keras.layers.Layer)
            has_rule = type(operation).__name__ in self._scheme.operations
            if is_layer or not has_rule or self._which == "annotated":
                return outputs
            return FakeQuantize(self._scheme.activations, **self._schedule)(outputs)

        # Of a compiled model Keras would compile the copy, from configurations alone.
        uncompiled = keras.Model(model.input, model.output, name=model.name)
        return keras.models.clone_model(
            uncompiled,
            input_tensors=inputs,
            clone_function=self._copy,
            call_function=call,
        )

    def _copy_weights(self) -> None:
        for old, new in self._copies.items():
            if not old.built:
                continue
            wrapped = isinstance(new, QuantizeWrapper)
            target = new.layer if wrapped else new
            for a, b in zip(old.variables, target.variables, strict=True):
                b.assign(a)
            if wrapped:
                new.set_weight_ranges()

    def _input_layers(self) -> list[FakeQuantize]:
        """Returns a new layer that quantizes inputs, if the scheme does."""
        if self._scheme.inputs is None:
            return []
        return [FakeQuantize(self._scheme.inputs, **self._schedule)]


def _renumbered(calls: Sequence[Call], first: int) -> list[Call]:
    """Returns calls with the ids of their values counted from `first`."""
    return [
        dataclasses.replace(
            call,
            input_ids=tuple(first + n for n in call.input_ids),
            output_ids=tuple(first + n for n in call.output_ids),
        )
        for call in calls
    ]


def _takes_rounded(call: Call) -> bool:
    """Returns whether rounded inputs give a layer's outputs, but for the rounding."""
    return not isinstance(without_annotation(call.layer), _COMPARES_VALUES)
