"""Multi-device functions: a function on several devices, called in parts of one each.

Parts name no device: they are called on the device of their shard, so parts that
compute the same are one function, for whichever shard, stage and replica.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.devices import sharding
from tfgpipe.graph import partitioner, pieces
from tfgpipe.graph.pieces import DevicePart


class MultiDeviceFunction:
    """A function of known shapes whose operations are on placeholder devices.

    Called as a `GraphFunction` is.

    Args:
        name: What to call it.
        function: The function, traced.
        library: Functions to share. New ones are added.
    """

    def __init__(self, name: str, function: Any, library: dict[Hashable, Any]) -> None:
        self._function = function
        graph = _PlacedGraph(function)
        self._given = [x.name for x in function.inputs]
        self._made = graph.outputs
        split = pieces.split_by_device(graph.inputs, graph.devices, copies=graph.copies)
        self._parts = [_part(name, graph, piece, library) for piece in split]

    @property
    def graph(self) -> tf.Graph:
        """What the function computes."""
        return self._function.graph

    def __call__(
        self, *tensors: tf.Tensor, devices: Sequence[str] = ()
    ) -> list[tf.Tensor]:
        """Calls the function.

        Args:
            *tensors: Its arguments.
            devices: Those of the shards; nothing for all here.
        """
        given = [*tensors, *self._function.captured_inputs]
        values = dict(zip(self._given, given, strict=True))
        for part in self._parts:
            read = [values[name] for name in part.inputs]
            on = (
                tf.device(devices[part.device]) if devices else contextlib.nullcontext()
            )
            with on:
                made = [tf.identity(*read)] if part.call is None else part.call(*read)
            values.update(zip(part.outputs, made, strict=True))
        return [values[name] for name in self._made]


@dataclasses.dataclass(frozen=True)
class _DeviceFunction:
    """A piece with the function that computes it; a move has none."""

    device: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    call: functions.GraphFunction | None


class _PlacedGraph:
    """A traced function, without copies that would bring tensors to the primary device.

    By themselves, TensorFlow's functions copy what they are given and what they return;
    and what `tf.custom_gradient` decorates, all of it, weights too. These copies name
    no device.

    Attributes:
        outputs: Names of the tensors that are returned.
        inputs: The computation, as `graph.partitioner` takes it apart.
        devices: For each operation, the shard on whose device it is.
        copies: Operations that do nothing but copy.
        constants: Operations that are no part of it, but of each piece that reads them.
        nodes: The operations as TensorFlow writes them down.
        readers: For each tensor, the operations that read it.
    """

    def __init__(self, function: Any) -> None:
        graph = function.graph
        self.operations = {op.name: op for op in graph.get_operations()}
        definition = graph.as_graph_def()
        self.nodes = {node.name: node for node in definition.node}
        self.versions, self.library = definition.versions, definition.library
        self._given = {x.name for x in function.inputs}
        self.outputs = [self._made(x) for x in function.outputs]
        constants = {n for n, op in self.operations.items() if op.type == "Const"}
        self.constants = constants - set(map(partitioner.op_name, self.outputs))
        everything = partitioner.topological_order(
            {name: self._read(op) for name, op in self.operations.items()}
        )
        needed = partitioner.subgraph(
            everything,
            fetches=[*self.outputs, *(f"^{op.name}" for op in graph.control_outputs)],
            feeds=self._given,
        ).operations
        self.inputs = {
            name: read
            for name, read in everything.items()
            if name in needed and name not in self.constants
        }
        self.devices = {
            name: sharding.shard_index(self.operations[name].device) or 0
            for name in self.inputs
        }
        self.copies = [n for n in self.inputs if self.operations[n].type == "Identity"]
        self.readers: dict[str, set[str]] = {name: {""} for name in self.outputs}
        for name, read in self.inputs.items():
            for tensor in read:
                self.readers.setdefault(tensor, set()).add(name)

    def tensor(self, name: str) -> tf.Tensor:
        """Returns the tensor of a name."""
        return self.operations[partitioner.op_name(name)].outputs[
            int(name.split(":")[1])
        ]

    def _read(self, op: tf.Operation) -> tuple[str, ...]:
        behind = [
            f"^{x.name}" for x in op.control_inputs if not self._is_unplaced_copy(x)
        ]
        return (*map(self._copied_from, op.inputs), *behind)

    def _copied_from(self, tensor: tf.Tensor) -> str:
        """Returns the name of what a tensor is, if it is a bare copy, a copy of."""
        while self._is_unplaced_copy(tensor.op):
            tensor = tensor.op.inputs[tensor.value_index]
        return tensor.name

    def _made(self, tensor: tf.Tensor) -> str:
        if tensor.op.type == "Identity" and not tensor.op.device:
            return self._copied_from(tensor.op.inputs[0])
        return self._copied_from(tensor)

    def _is_unplaced_copy(self, op: tf.Operation) -> bool:
        if op.type == "IdentityN":
            return True
        return (
            op.type == "Identity"
            and not op.device
            and not op.control_inputs
            and op.inputs[0].name in self._given
        )


def _part(
    name: str, graph: _PlacedGraph, piece: DevicePart, library: dict[Hashable, Any]
) -> _DeviceFunction:
    inside = set(piece.operations)
    read = dict.fromkeys(
        tensor
        for operation in piece.operations
        for tensor in graph.inputs[operation]
        if not tensor.startswith("^") and partitioner.op_name(tensor) not in inside
    )
    reads = tuple(x for x in read if partitioner.op_name(x) not in graph.constants)
    makes = tuple(
        tensor.name
        for operation in piece.operations
        for tensor in graph.operations[operation].outputs
        if graph.readers.get(tensor.name, inside) - inside
    )
    if piece.is_copy:
        return _DeviceFunction(piece.device, reads, makes, None)
    constants = {partitioner.op_name(x): None for x in read if x not in reads}
    definition, fed, fetched = _with_canonical_names(
        graph, [*constants, *piece.operations], reads, makes
    )
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in map(graph.tensor, reads)]
    content = definition.SerializeToString(deterministic=True)
    key = (name, content, fetched, tuple(map(repr, specs)))
    if key not in library:

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            results = tf.graph_util.import_graph_def(
                definition,
                input_map=dict(zip(fed, tensors, strict=True)),
                return_elements=fetched,
                name="",
            )
            for result, made in zip(results, makes, strict=True):
                result.set_shape(graph.tensor(made).shape)
            return list(results)

        traced = functions.trace_function(run, specs, name=f"piece_of_{name}")
        library[key] = functions.GraphFunction(name, traced)
    return _DeviceFunction(piece.device, reads, makes, library[key])


def _with_canonical_names(
    graph: _PlacedGraph,
    operations: Sequence[str],
    reads: Sequence[str],
    makes: Sequence[str],
) -> tuple[tf.compat.v1.GraphDef, tuple[str, ...], tuple[str, ...]]:
    """Returns operations under canonical names, with the new names of both ends."""
    definition = tf.compat.v1.GraphDef(versions=graph.versions)
    numbers = {name: f"o{number}" for number, name in enumerate(operations)}
    fed = {name: f"i{number}:0" for number, name in enumerate(reads)}

    def renamed(tensor: str) -> str:
        operation, colon, index = tensor.partition(":")
        return fed.get(tensor) or numbers[operation] + colon + index

    for name, number in numbers.items():
        node = definition.node.add()
        node.CopyFrom(graph.nodes[name])
        node.name = number
        functions.forget_trace(node)
        if sharding.shard_index(node.device) is not None:
            node.device = ""
        read = graph.inputs.get(name, ())
        node.input[:] = [renamed(x) for x in read if not x.startswith("^")]
        behind = (
            numbers.get(partitioner.op_name(x)) for x in read if x.startswith("^")
        )
        node.input.extend(f"^{x}" for x in behind if x is not None)
        if any(attr.HasField("func") or attr.list.func for attr in node.attr.values()):
            definition.library.CopyFrom(graph.library)
    return definition, tuple(fed.values()), tuple(map(renamed, makes))
