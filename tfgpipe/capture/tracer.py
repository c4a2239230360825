"""Captures a Keras model as IR: a graph of calls.

Keras records the calls of a Functional model; a list of layers is called once on
symbolic tensors. Models inside models are inlined, so that stage boundaries can be
inside them, wherever calling the inner model does nothing but run its own graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap
from tfgpipe.capture.ir import Call, CallGraph, Value


@dataclasses.dataclass(frozen=True)
class CapturedModel:
    """The calls of a model, with the shapes and types of their values.

    Attributes:
        graph: The calls.
        specs: For each value, its shape and type in the capture.
        inputs: The symbolic tensors that it was captured on, nested.
        side_inputs: The names of the tensors beside these.
        output_structure: The outputs of the model, nested, with a `Value` for each
            tensor.
        opaque_calls: Descriptions of calls that are not inlined though there are layers
            inside, by index.
    """

    graph: CallGraph
    specs: Mapping[int, keras.KerasTensor]
    inputs: Any
    side_inputs: tuple[str, ...]
    output_structure: Any
    opaque_calls: Mapping[int, str]

    @property
    def constants(self) -> list[Any]:
        """The arguments of its calls that are no values: variables, numbers, names."""
        arguments = [(call.args, dict(call.kwargs)) for call in self.graph.calls]
        leaves = keras.tree.flatten(arguments)
        return [leaf for leaf in leaves if not isinstance(leaf, Value)]

    def outputs(self) -> Any:
        """Returns the symbolic outputs, nested."""
        return keras.tree.map_structure(
            lambda value: self.specs[value.id], self.output_structure
        )


Ids = IdentityMap[keras.KerasTensor, int]


class _GraphBuilder:
    """Assigns ids to symbolic tensors, and captures calls on them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.specs: dict[int, keras.KerasTensor] = {}
        self.opaque_calls: dict[int, str] = {}

    def add_value(self, tensor: keras.KerasTensor) -> int:
        """Adds a value, and returns its id."""
        value_id = len(self.specs)
        self.specs[value_id] = tensor
        return value_id

    def add_call(
        self,
        layer: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: Sequence[keras.KerasTensor],
        ids: Ids,
    ) -> None:
        """Adds a call on tensors with these ids, and the ids of its outputs to them."""
        args, kwargs = keras.tree.map_structure(
            lambda leaf: Value(ids[leaf]) if _is_tensor(leaf) else leaf,
            (args, dict(kwargs)),
        )
        leaves = keras.tree.flatten((args, kwargs))
        input_ids = dict.fromkeys(x.id for x in leaves if isinstance(x, Value))
        output_ids = tuple(map(self.add_value, outputs))
        ids.update(zip(outputs, output_ids, strict=True))
        self.calls.append(Call(layer, args, kwargs, tuple(input_ids), output_ids))

    def inline(self, graph: keras.Model, inputs: Sequence[int]) -> list[int]:
        """Adds the calls of a Functional model on values; returns the output ids."""
        ids: Ids = IdentityMap(zip(graph.inputs, inputs, strict=True))
        for node in keras_internals.functional.nodes(graph):
            if any(tensor not in ids for tensor in node.inputs):
                continue  # Belongs to another model that shares the layer.
            inner = _inlinable_graph(node)
            if isinstance(inner, str):
                if inner:
                    self.opaque_calls[len(self.calls)] = inner
                self.add_call(node.operation, node.args, node.kwargs, node.outputs, ids)
            else:
                arguments = keras.tree.flatten(node.args)
                outputs = self.inline(inner, [ids[tensor] for tensor in arguments])
                ids.update(zip(node.outputs, outputs, strict=True))
        return [ids[tensor] for tensor in graph.outputs]


def capture_functional(model: keras.Model) -> CapturedModel:
    """Captures a Functional model."""
    builder = _GraphBuilder()
    inputs = list(map(builder.add_value, model.inputs))
    outputs = builder.inline(model, inputs)
    structure = keras.tree.pack_sequence_as(model.output, list(map(Value, outputs)))
    order = branches_apart(builder.calls, inputs)
    calls = tuple(builder.calls[i] for i in order)
    places = {i: place for place, i in enumerate(order)}
    graph = CallGraph(calls, tuple(inputs), tuple(outputs))
    captured = CapturedModel(
        graph,
        builder.specs,
        model.input,
        (),
        unpack_single(structure),
        {places[i]: reason for i, reason in builder.opaque_calls.items()},
    )
    for value in captured.constants:
        # Only looked for where there is one: variables may have no values yet.
        owners = model.variables if isinstance(value, tf.Variable) else ()
        for variable in owners:
            if variable.value is value:
                raise ValueError(
                    "An operation of a graph takes a weight as a Keras variable, which "
                    "leads to its value wherever that is. Received the value itself, "
                    f"of '{variable.path}'. Leave out `.value`."
                )
    return captured


def branches_apart(calls: Sequence[Call], input_ids: Sequence[int]) -> list[int]:
    """Returns an order of calls in which those of one input follow one another.

    Keras orders calls by their distance from the outputs, which takes turns between two
    encoders that a model joins: a b a b a b, join. A stage is of calls that follow one
    another, so it would have some of both. Here the order is a a a b b b, join. Calls
    move back alone, to where the last one of their input is, and only if none that
    reads another input as well needs them before; and none if two would change a
    variable in another order.

    Args:
        calls: The calls, each after those whose results it uses.
        input_ids: Ids of the model's inputs.
    """
    inputs = {number: frozenset([number]) for number in input_ids}
    branches: list[frozenset[int]] = []
    for call in calls:
        read = [inputs.get(number, frozenset()) for number in call.input_ids]
        branches.append(frozenset().union(*read))
        inputs.update(dict.fromkeys(call.output_ids, branches[-1]))
    last = {branch: i for i, branch in enumerate(branches) if len(branch) == 1}
    needed: dict[frozenset[int], int] = {}  # The first call of several that reads one.
    for i, call in enumerate(calls):
        for number in call.input_ids:
            branch = inputs.get(number, frozenset())
            if branch != branches[i]:
                needed.setdefault(branch, i)
    place = {
        branch: end
        for branch, end in last.items()
        if needed.get(branch, len(calls)) > end
    }
    usual = list(range(len(calls)))
    order = sorted(usual, key=lambda i: (place.get(branches[i], i), i))
    if order == usual:
        return usual
    latest: IdentityMap[keras.Variable, int] = IdentityMap()
    for i in order:
        for variable in getattr(calls[i].layer, "non_trainable_variables", ()):
            if latest.setdefault(variable, i) > i:
                return usual
            latest[variable] = i
    return order


def capture_layers(
    layers: Sequence[keras.layers.Layer],
    inputs: Any,
    side_inputs: Mapping[str, keras.KerasTensor],
) -> CapturedModel:
    """Captures layers that each take the outputs of the one before.

    Args:
        layers: The layers. Those that are not built become so.
        inputs: The inputs of the first layer, symbolic tensors in any structure.
        side_inputs: Tensors by name, each for all layers whose `call` has an argument
            of that name.
    """
    builder = _GraphBuilder()
    tensors = [*_tensors(inputs), *side_inputs.values()]
    ids: Ids = IdentityMap((tensor, builder.add_value(tensor)) for tensor in tensors)
    values = inputs
    for layer in layers:
        kwargs = {n: x for n, x in side_inputs.items() if accepts_argument(layer, n)}
        outputs = layer(values, **kwargs)
        builder.add_call(layer, (values,), kwargs, _tensors(outputs), ids)
        values = outputs
    graph = CallGraph(
        tuple(builder.calls),
        input_ids=tuple(range(len(tensors))),
        output_ids=tuple(ids[tensor] for tensor in _tensors(values)),
    )
    structure = keras.tree.map_structure(lambda x: Value(ids[x]), values)
    opaque = opaque_in_list(layers)
    names = tuple(side_inputs)
    return CapturedModel(graph, builder.specs, inputs, names, structure, opaque)


def unpack_single(outputs: Any) -> Any:
    """Returns the only output of a model instead of a list of it, as Keras does."""
    alone = isinstance(outputs, list | tuple) and len(outputs) == 1
    return outputs[0] if alone else outputs


def accepts_argument(layer: keras.layers.Layer, side_input: str) -> bool:
    """Returns whether a layer's `call` has an argument of the given name."""
    return side_input in layer.call_signature_parameters


def opaque_in_list(layers: Sequence[keras.layers.Layer]) -> dict[int, str]:
    """Returns the `opaque_calls` of a list of layers, which are not inlined."""
    return {
        i: _opaque_reason(layer) or "a model in a list of layers"
        for i, layer in enumerate(layers)
        if len(keras_internals.layers.inner_layers(layer)) > 1
    }


def _opaque_reason(operation: Any) -> str:
    """Describes a layer whose inner calls Keras does not know, as a phrase, or `""`."""
    if (
        len(keras_internals.layers.inner_layers(operation)) <= 1
        or keras_internals.functional.functional_graph(operation) is not None
    ):
        return ""
    if isinstance(operation, keras.Sequential) and not operation.built:
        return "a Sequential model that is not built"
    kind = "model" if isinstance(operation, keras.Model) else "layer"
    return f"a {kind} with a `call` of its own"


def _inlinable_graph(node: keras_internals.functional.Node) -> keras.Model | str:
    """Returns the graph that computes the same as a call of a model.

    If there is none, a phrase that describes the opaque call, or an empty string where
    there are no layers inside.
    """
    graph = keras_internals.functional.functional_graph(node.operation)
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
    inputs, expected = node.args[0], graph.input
    if _is_tensor(inputs) and not _is_tensor(expected):
        inputs = [inputs]
    otherwise = "a model called on inputs of another structure, rank or type"
    try:
        keras.tree.assert_same_structure(inputs, expected)
    except (TypeError, ValueError):
        return otherwise
    given = keras.tree.flatten(inputs)
    if not all(map(_is_tensor, given)):
        return "a model called with a constant for an input"
    pairs = zip(given, graph.inputs, strict=True)
    same = all(a.dtype == b.dtype and a.ndim == b.ndim for a, b in pairs)
    return graph if same else otherwise


def _tensors(structure: Any) -> list[keras.KerasTensor]:
    return [x for x in keras.tree.flatten(structure) if _is_tensor(x)]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, keras.KerasTensor)
