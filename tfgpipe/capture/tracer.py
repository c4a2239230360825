"""Captures a Keras model as IR: a network of calls.

A Functional model remembers the calls that made it; a list of layers is called once on
symbolic tensors. Models inside models are opened, so that a cut can go through them,
wherever calling the inner model does nothing but run its own graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfgpipe._compat import keras_internals
from tfgpipe.capture.ir import Call, CallGraph, Value


@dataclasses.dataclass(frozen=True)
class CapturedModel:
    """A network, and what its values are.

    Attributes:
        graph: The calls.
        specs: For each value, its shape and type while it was recorded.
        output_structure: What the model returns, nested, with a `Value` for each
            tensor.
        opaque_calls: By the positions of calls that are not opened though there are
            layers inside, what these are, as a phrase.
    """

    graph: CallGraph
    specs: Mapping[int, keras.KerasTensor]
    output_structure: Any
    opaque_calls: Mapping[int, str]


class _GraphBuilder:
    """Assigns ids to symbolic tensors, and records calls on them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.specs: dict[int, keras.KerasTensor] = {}
        self.closed: dict[int, str] = {}

    def value_id(self, tensor: keras.KerasTensor) -> int:
        number = len(self.specs)
        self.specs[number] = tensor
        return number

    def call(
        self,
        layer: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: Sequence[keras.KerasTensor],
        numbers: Mapping[int, int],
    ) -> list[int]:
        """Records a call on tensors with these ids; returns the ids of its outputs."""
        args, kwargs = keras.tree.map_structure(
            lambda leaf: Value(numbers[id(leaf)]) if _is_tensor(leaf) else leaf,
            (args, dict(kwargs)),
        )
        leaves = keras.tree.flatten((args, kwargs))
        reads = dict.fromkeys(x.id for x in leaves if isinstance(x, Value))
        makes = [self.value_id(tensor) for tensor in outputs]
        self.calls.append(Call(layer, args, kwargs, tuple(reads), tuple(makes)))
        return makes

    def graph(self, graph: keras.Model, inputs: Sequence[int]) -> list[int]:
        """Records the calls of a Functional model on values with these ids."""
        numbers = dict(zip(map(id, graph.inputs), inputs, strict=True))
        for node in keras_internals.nodes(graph):
            if any(id(tensor) not in numbers for tensor in node.inputs):
                continue  # Belongs to another model that shares the layer.
            inner = _inlinable_graph(node)
            if isinstance(inner, str):
                if inner:
                    self.closed[len(self.calls)] = inner
                made = self.call(
                    node.operation, node.args, node.kwargs, node.outputs, numbers
                )
            else:
                given = keras.tree.flatten(node.args)
                made = self.graph(inner, [numbers[id(tensor)] for tensor in given])
            numbers.update(zip(map(id, node.outputs), made, strict=True))
        return [numbers[id(tensor)] for tensor in graph.outputs]


def capture_functional(graph: keras.Model) -> CapturedModel:
    """Records a Functional model."""
    recorder = _GraphBuilder()
    inputs = [recorder.value_id(tensor) for tensor in graph.inputs]
    outputs = recorder.graph(graph, inputs)
    output = keras.tree.pack_sequence_as(graph.output, [Value(n) for n in outputs])
    network = CallGraph(tuple(recorder.calls), tuple(inputs), tuple(outputs))
    return CapturedModel(
        network, recorder.specs, unpack_single(output), recorder.closed
    )


def capture_layers(
    layers: Sequence[keras.layers.Layer],
    inputs: Any,
    side_inputs: Mapping[str, keras.KerasTensor],
) -> CapturedModel:
    """Records layers that each take what the one before returns.

    Args:
        layers: The layers. Those that are not built become so.
        inputs: What the first layer takes, symbolic tensors in any structure.
        side_inputs: Tensors by name, each for all layers whose `call` has an argument
            of that name.
    """
    recorder = _GraphBuilder()
    given = [*_tensors(inputs), *side_inputs.values()]
    numbers = {id(tensor): recorder.value_id(tensor) for tensor in given}
    values = inputs
    for layer in layers:
        kwargs = {n: x for n, x in side_inputs.items() if accepts_argument(layer, n)}
        outputs = layer(values, **kwargs)
        made = recorder.call(layer, (values,), kwargs, _tensors(outputs), numbers)
        numbers.update(zip(map(id, _tensors(outputs)), made, strict=True))
        values = outputs
    output = keras.tree.map_structure(lambda x: Value(numbers[id(x)]), values)
    network = CallGraph(
        tuple(recorder.calls),
        tuple(range(len(given))),
        tuple(numbers[id(tensor)] for tensor in _tensors(values)),
    )
    return CapturedModel(network, recorder.specs, output, opaque_in_list(layers))


def unpack_single(outputs: Any) -> Any:
    """Returns the only output of a model instead of a list of it, as Keras does."""
    alone = isinstance(outputs, list | tuple) and len(outputs) == 1
    return outputs[0] if alone else outputs


def accepts_argument(layer: keras.layers.Layer, side_input: str) -> bool:
    """Returns whether a layer's `call` has an argument of the given name."""
    return side_input in layer.call_signature_parameters


def opaque_in_list(layers: Sequence[keras.layers.Layer]) -> dict[int, str]:
    """Returns the `opaque_calls` of a list of layers, whose entries are not opened."""
    return {
        i: _opaque_reason(layer) or "a model in a list of layers"
        for i, layer in enumerate(layers)
        if len(keras_internals.inner_layers(layer)) > 1
    }


def _opaque_reason(operation: Any) -> str:
    """Describes a layer whose inner calls Keras does not know, as a phrase.

    An empty string for a model of which it does, and where there is nothing inside.
    """
    if (
        len(keras_internals.inner_layers(operation)) <= 1
        or keras_internals.functional_graph(operation) is not None
    ):
        return ""
    if isinstance(operation, keras.Sequential) and not operation.built:
        return "a Sequential model that is not built"
    kind = "model" if isinstance(operation, keras.Model) else "layer"
    return f"a {kind} with a `call` of its own"


def _inlinable_graph(node: keras_internals.Node) -> keras.Model | str:
    """Returns the graph to run in place of a call of a model, if that is the same.

    Else what it is that has layers inside and is not opened, as a phrase, or an empty
    string if there are none inside.
    """
    graph = keras_internals.functional_graph(node.operation)
    if graph is None:
        return _opaque_reason(node.operation)
    # Keras records masks that it found on inputs as if they were passed as arguments,
    # and puts them on again even if some layer has since removed them.
    masks = keras.tree.flatten(node.kwargs.get("mask"))
    others = sorted(set(node.kwargs) - {"mask"})
    if len(node.args) != 1 or others:
        return f"a model called with further arguments ({', '.join(others) or 'args'})"
    if any(mask is not None for mask in masks):
        return "a model called on inputs with masks"
    given = node.args[0]
    expected = graph.input
    if _is_tensor(given) and not _is_tensor(expected):
        given = [given]
    otherwise = "a model called on inputs of another structure, rank or type"
    try:
        keras.tree.assert_same_structure(given, expected)
    except (TypeError, ValueError):
        return otherwise
    pairs = zip(_tensors(given), graph.inputs, strict=True)
    same = all(a.dtype == b.dtype and a.ndim == b.ndim for a, b in pairs)
    return graph if same else otherwise


def _tensors(structure: Any) -> list[keras.KerasTensor]:
    return [x for x in keras.tree.flatten(structure) if _is_tensor(x)]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, keras.KerasTensor)
