"""Quantizing a whole model, or a list of layers.

What the user has stays as it is. The result is a copy, with the same weights, each
layer in a wrapper of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import keras

from tfgpipe._compat import keras_internals
from tfgpipe._util import check_choice
from tfgpipe.capture import Call, source_model, tracer
from tfgpipe.pipelined_layer import PipelinedLayer
from tfgpipe.pipelined_model import PipelinedModel
from tfgpipe.quantization.config import QuantizeConfig
from tfgpipe.quantization.points import RangeUpdate
from tfgpipe.quantization.scheme import NOTHING, Scheme, chosen, default_8bit
from tfgpipe.quantization.shell import Shell
from tfgpipe.quantization.wrapper import (
    FakeQuantize,
    QuantizeWrapper,
    check_unquantized,
)

Which = Literal["all", "annotated"]
# Layers that look for certain numbers in their inputs, which rounding would change.
_TAKES_AS_IT_IS = (keras.layers.Embedding, keras.layers.Masking)
Quantizable: TypeAlias = keras.Model | Sequence[keras.layers.Layer]


@keras.saving.register_keras_serializable(package="tfgpipe")
class Annotated(Shell):
    """A layer with a note of how `apply` is to quantize it. See `annotate`."""

    def __init__(
        self, layer: keras.layers.Layer, config: QuantizeConfig | None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("name", f"annotated_{layer.name}")
        super().__init__(layer, **kwargs)
        self.config = config

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        config = self.config and keras.saving.serialize_keras_object(self.config)
        return {**super().get_config(), "config": config}


def annotate(
    layer: keras.layers.Layer, config: QuantizeConfig | None = None
) -> keras.layers.Layer:
    """Returns a layer with a note of how `apply` is to quantize it.

    Until then it does what it did.

    Example:

    >>> output = keras.layers.Dense(10)
    >>> layers = [
    ...     keras.layers.Dense(16),
    ...     tfgpipe.quantization.annotate(
    ...         output, tfgpipe.quantization.QuantizeConfig()
    ...     ),
    ... ]
    >>> quantized = tfgpipe.quantization.apply(layers)  # All but the last.
    >>> [layer.name.partition("_")[0] for layer in quantized]
    ['fake', 'quant', 'dense']

    Args:
        layer: Any layer.
        config: What of it is quantized, and how; an empty one for nothing. None for
            what the scheme says.

    Raises:
        TypeError: If it is no layer, or `config` is no configuration.
        ValueError: If it is annotated already.
    """
    if not isinstance(layer, keras.layers.Layer) or isinstance(layer, keras.Model):
        raise TypeError(
            "What is annotated is a layer. Received "
            f"{layer!r} of type {type(layer).__name__}. `apply` takes models as they "
            "are."
        )
    if not isinstance(config, QuantizeConfig | None):
        raise TypeError(
            "A layer is annotated with a `tfgpipe.quantization.QuantizeConfig`. "
            f"Received {config!r} of type {type(config).__name__} for layer "
            f"'{layer.name}'."
        )
    if isinstance(layer, Annotated):
        raise ValueError(
            f"Layer '{layer.layer.name}' is annotated already. Received it with "
            f"{layer.config}. Annotate the layer itself."
        )
    return Annotated(layer, config)


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
        which: Whether all layers are quantized, or those that are annotated.
        quantize_inputs: Whether what comes in is quantized as well, as a model that is
            to run in integers alone needs.
        range_update: As of `QuantizeWrapper`.
        delay: Likewise.
        freeze_after: Likewise.

    Raises:
        TypeError: If it is neither a model whose calls Keras knows nor layers.
        ValueError: If a layer has no rule, is quantized already, or is pipelined.
    """
    check_choice("which", which, ("all", "annotated"))
    plan = _Plan(
        scheme=scheme or default_8bit(),
        which=which,
        timing={
            "range_update": range_update,
            "delay": delay,
            "freeze_after": freeze_after,
        },
    )
    given = model_or_layers
    if keras_internals.graph_of(given) is not None:
        return plan.model(given, inputs=quantize_inputs)
    if isinstance(given, keras.Sequential):
        layers = plan.layers(given.layers, inputs=quantize_inputs)
        return keras.Sequential(layers, name=given.name)
    return plan.layers(source_model.check_layer_list(given), inputs=quantize_inputs)


class _Plan:
    """How each layer of a model is quantized, and the copies made so far."""

    def __init__(self, scheme: Scheme, which: Which, timing: dict[str, Any]) -> None:
        self._scheme = scheme
        self._which = which
        self._timing = timing
        self._configs: dict[int, QuantizeConfig] = {}
        self._copies: dict[int, tuple[keras.layers.Layer, keras.layers.Layer]] = {}
        self._models: dict[int, keras.Model] = {}

    def layers(
        self, layers: Sequence[keras.layers.Layer], *, inputs: bool
    ) -> list[keras.layers.Layer]:
        """Returns copies of layers, and of models among them, quantized."""
        calls: list[Call] = []
        for layer in layers:
            # Values of two models have numbers of their own.
            first = 1 + max((n for call in calls for n in call.makes), default=0)
            graph = keras_internals.graph_of(layer)
            if graph is None:
                before = calls[-1].makes if calls else (0,)
                calls.append(Call(layer, (), {}, before, (first,)))
            else:
                calls += _renumbered(tracer.from_graph(graph).network.calls, first)
        self._decide(calls, calls[-1].makes)
        copies = [self._clone(layer) for layer in layers]
        for old, new in self._copies.values():
            if old.built and not new.built:
                new.build_from_config(old.get_build_config())
        self._copy_weights()
        numeric = not isinstance(_bare(calls[0].layer), _TAKES_AS_IT_IS)
        return [*(self._first() if inputs and numeric else []), *copies]

    def model(self, model: keras.Model, *, inputs: bool) -> keras.Model:
        """Returns a copy of a model, quantized, not compiled."""
        network = tracer.from_graph(keras_internals.graph_of(model)).network
        self._decide(network.calls, network.outputs)
        numeric = [
            not any(
                n in call.reads and isinstance(_bare(call.layer), _TAKES_AS_IT_IS)
                for call in network.calls
            )
            for n in network.inputs
        ]
        copy = self._graph(model, [inputs and x for x in numeric])
        self._copy_weights()
        return copy

    def _decide(self, calls: Sequence[Call], outputs: Sequence[int]) -> None:
        """Decides how each layer is quantized."""
        for call in calls:
            _check(call.layer)
        notes = {id(c.layer): c.layer for c in calls if isinstance(c.layer, Annotated)}
        annotated = {
            id(note.layer): note.config
            for note in notes.values()
            if note.config is not None
        }
        if self._which == "annotated":
            others = [c.layer for c in calls if id(c.layer) not in notes]
            annotated.update({id(layer): NOTHING for layer in others})
        bare = [dataclasses.replace(c, layer=_bare(c.layer)) for c in calls]
        self._configs = chosen(bare, outputs, self._scheme, annotated)

    def _graph(self, model: keras.Model, numeric: Sequence[bool]) -> keras.Model:
        """Returns a copy of a model whose calls Keras knows, quantized.

        Args:
            model: A Functional or Sequential model.
            numeric: For each input, whether to quantize it.
        """
        if not isinstance(model, keras.Sequential):
            return self._functional(model, numeric)
        entry = keras.Input(batch_shape=model.input_shape, dtype=model.inputs[0].dtype)
        first = self._first() if numeric[0] and _is_floating(entry) else []
        copies = [self._clone(layer) for layer in model.layers]
        return keras.Sequential([entry, *first, *copies], name=model.name)

    def _functional(self, model: keras.Model, numeric: Sequence[bool]) -> keras.Model:
        entries = keras.tree.map_structure(
            lambda x: keras.Input(batch_shape=x.shape, dtype=x.dtype, name=x.name),
            model.input,
        )
        flat = keras.tree.flatten(entries)
        quantized = {
            id(x): first(x)
            for x, quantizes in zip(flat, numeric, strict=True)
            if quantizes and _is_floating(x)
            for first in self._first()
        }

        def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = keras.tree.map_structure(
                lambda x: quantized.get(id(x), x), (args, kwargs)
            )
            outputs = operation(*args, **kwargs)
            if isinstance(operation, keras.layers.Layer) or self._which != "all":
                return outputs
            if type(operation).__name__ not in self._scheme.operations:
                return outputs
            return FakeQuantize(self._scheme.activations, **self._timing)(outputs)

        # Of a compiled model Keras would compile the copy, from configurations alone.
        uncompiled = keras.Model(model.input, model.output, name=model.name)
        return keras.models.clone_model(
            uncompiled,
            input_tensors=entries,
            clone_function=self._clone,
            call_function=call,
        )

    def _clone(self, layer: Any) -> Any:
        """Returns a copy of a layer, or of a model among layers, quantized."""
        if keras_internals.graph_of(layer) is None:
            return self._copy(layer)
        if id(layer) not in self._models:
            # What goes into a model inside another was quantized where it was made.
            unquantized = [False] * len(layer.inputs)
            self._models[id(layer)] = self._graph(layer, unquantized)
        return self._models[id(layer)]

    def _copy(self, layer: Any) -> Any:
        """Returns a copy of a layer, quantized; of an operation, itself."""
        layer = _bare(layer)
        if not isinstance(layer, keras.layers.Layer):
            return layer
        if isinstance(layer, keras.layers.InputLayer):
            return type(layer).from_config(layer.get_config())
        if id(layer) not in self._copies:
            copy = type(layer).from_config(layer.get_config())
            config = self._configs[id(layer)]
            if config != NOTHING:
                copy = QuantizeWrapper(copy, config, **self._timing)
            self._copies[id(layer)] = (layer, copy)
        return self._copies[id(layer)][1]

    def _copy_weights(self) -> None:
        for old, new in self._copies.values():
            inner = new.layer if isinstance(new, QuantizeWrapper) else new
            if not old.built:
                continue
            for source, target in zip(old.variables, inner.variables, strict=True):
                target.assign(source)
            if isinstance(new, QuantizeWrapper):
                new.set_weight_ranges()

    def _first(self) -> list[FakeQuantize]:
        if self._scheme.inputs is None:
            return []
        return [FakeQuantize(self._scheme.inputs, **self._timing)]


def _check(layer: Any) -> None:
    if isinstance(layer, PipelinedLayer | PipelinedModel):
        raise ValueError(
            "Layers are quantized before they are pipelined. Received "
            f"'{layer.name}' of type {type(layer).__name__}. Pipeline what "
            "`tfgpipe.quantization.apply` returns for its layers, or for its "
            "`unpipelined()` model."
        )
    check_unquantized(layer)


def _renumbered(calls: Sequence[Call], first: int) -> list[Call]:
    """Returns calls with the numbers of their values counted from another one."""
    return [
        dataclasses.replace(
            call,
            reads=tuple(first + n for n in call.reads),
            makes=tuple(first + n for n in call.makes),
        )
        for call in calls
    ]


def _bare(layer: Any) -> Any:
    """Returns the layer inside an annotation, or the layer itself."""
    return layer.layer if isinstance(layer, Annotated) else layer


def _is_floating(x: keras.KerasTensor) -> bool:
    return keras.backend.is_float_dtype(x.dtype)
