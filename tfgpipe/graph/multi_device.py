"""Multi-device functions: a function on several devices, called as one per device.

The functions per device name no device: they are called on the device of their shard,
so those that compute the same are one function, for whichever shard, stage and replica.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.devices import sharding
from tfgpipe.graph import partitioner
from tfgpipe.graph.device_subgraphs import DeviceSubgraph, split_by_device


class MultiDeviceFunction:
    """A function of known shapes whose operations are on placeholder devices.

    Called as a `GraphFunction` is.

    Args:
        name: Its name.
        function: The function, traced.
        cache: Functions to share. New ones are added.
    """

    def __init__(self, name: str, function: Any, cache: dict[Hashable, Any]) -> None:
        self._function = function
        graph = _PlacedGraph(function)
        self._outputs = graph.outputs
        self._calls = [
            _device_function(name, graph, subgraph, cache)
            for subgraph in split_by_device(
                graph.inputs, graph.devices, copies=graph.copies
            )
        ]

    @property
    def graph(self) -> tf.Graph:
        """The function's graph."""
        return self._function.graph

    def __call__(
        self, *tensors: tf.Tensor, devices: Sequence[str] = ()
    ) -> list[tf.Tensor]:
        """Calls the function.

        Args:
            *tensors: Its arguments.
            devices: Devices of the shards; empty for the current device.
        """
        arguments = [*tensors, *self._function.captured_inputs]
        names = [x.name for x in self._function.inputs]
        values = dict(zip(names, arguments, strict=True))
        for each in self._calls:
            inputs = [values[name] for name in each.inputs]
            device = devices[each.device] if devices else None
            with tf.device(device) if device else contextlib.nullcontext():
                outputs = each.call(*inputs) if each.call else [tf.identity(*inputs)]
            values.update(zip(each.outputs, outputs, strict=True))
        return [values[name] for name in self._outputs]


@dataclasses.dataclass(frozen=True)
class _DeviceFunction:
    """A device subgraph with the function that computes it; a copy has none."""

    device: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    call: functions.GraphFunction | None


class _PlacedGraph:
    """A traced function, without copies that would bring tensors to the primary device.

    By themselves, TensorFlow's functions copy their inputs and outputs; functions under
    `tf.custom_gradient` copy the weights they use, too. These copies name no device.

    Attributes:
        outputs: Names of the tensors that are returned.
        inputs: The computation, as a graph of `graph.partitioner`.
        devices: For each operation, the shard on whose device it is.
        copies: Operations that do nothing but copy.
        constants: Operations that are copied into each subgraph that uses them, and
            what they use: constants, and short lists of integers that are computed of
            these alone, as gradients compute permutations. XLA needs to see the values.
        nodes: The operations as `NodeDef`.
        readers: For each tensor, the operations that use it.
    """

    def __init__(self, function: Any) -> None:
        graph = function.graph
        self.operations = {op.name: op for op in graph.get_operations()}
        definition = graph.as_graph_def()
        self.nodes = {node.name: node for node in definition.node}
        self.versions, self.library = definition.versions, definition.library
        self._function_inputs = {x.name for x in function.inputs}
        self.outputs = [self._output_name(x) for x in function.outputs]
        everything = partitioner.topological_order(
            {name: self._input_names(op) for name, op in self.operations.items()}
        )
        returned = set(map(partitioner.op_name, self.outputs))
        self.constants: dict[str, tuple[str, ...]] = {}
        for name, inputs in everything.items():
            if name not in returned and self._is_constant(name, inputs):
                is_const = self.operations[name].type == "Const"
                self.constants[name] = () if is_const else tuple(inputs)
        needed = partitioner.subgraph(
            everything,
            fetches=[*self.outputs, *(f"^{op.name}" for op in graph.control_outputs)],
            feeds=self._function_inputs,
        ).operations
        self.inputs = {
            name: inputs
            for name, inputs in everything.items()
            if name in needed and name not in self.constants
        }
        self.devices = {
            name: sharding.shard_index(self.operations[name].device) or 0
            for name in self.inputs
        }
        self.copies = [n for n in self.inputs if self.operations[n].type == "Identity"]
        self.readers: dict[str, set[str]] = {name: {""} for name in self.outputs}
        for name, inputs in self.inputs.items():
            for tensor in inputs:
                self.readers.setdefault(tensor, set()).add(name)

    def tensor(self, name: str) -> tf.Tensor:
        """Returns the tensor of a name."""
        op, _, index = name.partition(":")
        return self.operations[op].outputs[int(index)]

    def with_constants(self, names: Sequence[str]) -> list[str]:
        """Returns constant operations and those that they use, in order."""
        needed = set(names)
        for name in reversed(self.constants):
            if name in needed:
                needed.update(map(partitioner.op_name, self.constants[name]))
        return [name for name in self.constants if name in needed]

    def _is_constant(self, name: str, inputs: Sequence[str]) -> bool:
        op = self.operations[name]
        if op.type == "Const":
            return True
        return (
            bool(inputs)
            and not op.op_def.is_stateful
            and all(x.dtype.is_integer and x.shape.rank in (0, 1) for x in op.outputs)
            and all(
                x[0] != "^" and partitioner.op_name(x) in self.constants for x in inputs
            )
        )

    def _input_names(self, op: tf.Operation) -> tuple[str, ...]:
        control = [x for x in op.control_inputs if not self._is_unplaced_copy(x)]
        return (*map(self._source, op.inputs), *(f"^{x.name}" for x in control))

    def _source(self, tensor: tf.Tensor) -> str:
        """Returns the name of a tensor, or of its source if it is an unplaced copy."""
        while self._is_unplaced_copy(tensor.op):
            tensor = tensor.op.inputs[tensor.value_index]
        return tensor.name

    def _output_name(self, tensor: tf.Tensor) -> str:
        is_copy = tensor.op.type == "Identity" and not tensor.op.device
        return self._source(tensor.op.inputs[0] if is_copy else tensor)

    def _is_unplaced_copy(self, op: tf.Operation) -> bool:
        if op.type == "IdentityN":
            return True
        return (
            op.type == "Identity"
            and not op.device
            and not op.control_inputs
            and op.inputs[0].name in self._function_inputs
        )


def _device_function(
    name: str, graph: _PlacedGraph, subgraph: DeviceSubgraph, cache: dict[Hashable, Any]
) -> _DeviceFunction:
    inside = set(subgraph.operations)
    outside = dict.fromkeys(
        tensor
        for operation in subgraph.operations
        for tensor in graph.inputs[operation]
        if not tensor.startswith("^") and partitioner.op_name(tensor) not in inside
    )
    inputs = tuple(x for x in outside if partitioner.op_name(x) not in graph.constants)
    outputs = tuple(
        tensor.name
        for operation in subgraph.operations
        for tensor in graph.operations[operation].outputs
        if graph.readers.get(tensor.name, inside) - inside
    )
    if subgraph.is_copy:
        return _DeviceFunction(subgraph.device, inputs, outputs, None)
    constants = graph.with_constants(
        [partitioner.op_name(x) for x in outside if x not in inputs]
    )
    definition, feeds, fetches = _with_canonical_names(
        graph, [*constants, *subgraph.operations], inputs, outputs
    )
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in map(graph.tensor, inputs)]
    content = definition.SerializeToString(deterministic=True)
    key = (name, content, fetches, tuple(map(repr, specs)))
    if key not in cache:

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            results = tf.graph_util.import_graph_def(
                definition,
                input_map=dict(zip(feeds, tensors, strict=True)),
                return_elements=fetches,
                name="",
            )
            for result, output in zip(results, outputs, strict=True):
                result.set_shape(graph.tensor(output).shape)
            return list(results)

        traced = functions.trace_function(run, specs, name=f"part_of_{name}")
        cache[key] = functions.GraphFunction(name, traced)
    return _DeviceFunction(subgraph.device, inputs, outputs, cache[key])


def _with_canonical_names(
    graph: _PlacedGraph,
    operations: Sequence[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> tuple[tf.compat.v1.GraphDef, tuple[str, ...], tuple[str, ...]]:
    """Returns operations under canonical names, with those of inputs and outputs."""
    definition = tf.compat.v1.GraphDef(versions=graph.versions)
    names = {name: f"o{i}" for i, name in enumerate(operations)}
    feeds = {name: f"i{i}:0" for i, name in enumerate(inputs)}

    def rename(tensor: str) -> str:
        operation, colon, index = tensor.partition(":")
        return feeds.get(tensor) or names[operation] + colon + index

    for name, canonical_name in names.items():
        node = definition.node.add()
        node.CopyFrom(graph.nodes[name])
        node.name = canonical_name
        functions.forget_trace(node)
        if sharding.shard_index(node.device) is not None:
            node.device = ""
        tensors = graph.constants.get(name) or graph.inputs.get(name, ())
        node.input[:] = [rename(x) for x in tensors if not x.startswith("^")]
        control = (x[1:] for x in tensors if x.startswith("^"))
        node.input.extend(f"^{names[x]}" for x in control if x in names)
        if any(attr.HasField("func") or attr.list.func for attr in node.attr.values()):
            definition.library.CopyFrom(graph.library)
    return definition, tuple(feeds.values()), tuple(map(rename, outputs))
