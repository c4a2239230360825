"""Where the operations of a step run on GPUs or TPUs, and what is copied for them.

The step is traced on the devices that there are. Its operations name their device, so
that those of the first stage are on the first GPU, and so on. What TensorFlow then does
follows from the kernels that are registered for GPUs, which its wheel has, or for TPUs,
which are in a table:

    no kernel for an operation's types    it runs on the host
    an argument in the host's memory      a tensor on the GPU is copied to the host,
                                          and the host waits for it
    int32 arguments of functions          are in the host's memory

    stage_forward on GPU:1                             memory
        seeds         argument, uint32                 GPU:1
        dropout/GetKeyCounter(seed: host)              seeds GPU:1 -> host: a copy
        dropout/RandomUniform(key: GPU)                key host -> GPU:1: a copy
        dense/MatMul                                   GPU:1

Calls are followed; a call counts as often as it runs, and a copy once for all that read
it.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from tfgpipe._compat import kernels
from tfgpipe._util import num_bytes
from tfgpipe.accelerators import tpu_kernels
from tfgpipe.devices import colocation
from tfgpipe.graph import reader

HOST = -1
"""The host, where others are the indices of devices."""

# The kernels of these are not the question: arguments, and what calls a function.
_CALL_FUNCTIONS = """
    Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf
    StatelessWhile While
"""
_CALLS = frozenset(_CALL_FUNCTIONS.split())
_LOWERED = _CALLS - {"PartitionedCall", "StatefulPartitionedCall"}
_NO_KERNEL_NEEDED = frozenset(["NoOp", "Placeholder", *_CALLS])
# In the memory of the host wherever the operation is.
_HANDLES = (tf.resource, tf.variant)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a step.

    Attributes:
        name: Its name, which begins with that of its layer.
        op: Its type.
        dtypes: The types of its inputs.
        function: The function of the step that has it, empty for the step itself.
        device: The index of its device.
    """

    name: str
    op: str
    dtypes: tuple[str, ...]
    function: str
    device: int


@dataclasses.dataclass(frozen=True)
class Copy:
    """A tensor that is copied from one memory to another.

    Attributes:
        operation: The operation that makes it, or that reads it if it is an argument of
            a function.
        reader: The operation that reads it first, with the name of its argument.
        num_bytes: Its size.
        source: The device in whose memory it is, or `HOST`.
        target: The device that it is copied to.
    """

    operation: Operation
    reader: str
    num_bytes: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class StepTally:
    """The devices of a step's operations, and the copies between them.

    Attributes:
        on_host: Operations of devices that have no kernel for their types there, with
            how often they run in a step.
        copies: The copies, with their number in a step.
    """

    on_host: collections.Counter[Operation]
    copies: collections.Counter[Copy]

    def add(self, other: StepTally, times: int) -> None:
        """Adds what another graph does, so often."""
        for name, counts in vars(other).items():
            mine = getattr(self, name)
            for key, count in counts.items():
                mine[key] += times * count


def place(
    graph: tf.Graph,
    optimized: Any,
    devices: Sequence[str],
    names: Sequence[str],
    kind: Literal["GPU", "TPU"],
) -> StepTally:
    """Places the operations of a step on devices of another type.

    Args:
        graph: The graph of a step, of known shapes.
        optimized: The graph as a `GraphDef`, with the functions that it calls
            optimized.
        devices: The names of the devices, as operations of the graph name them.
        names: The names of the devices in its place.
        kind: The type of these.
    """
    where = _devices_of_operations(graph, devices)
    memory = {
        x.name: where[x.op.name] if x.dtype == tf.resource else HOST
        for op in graph.get_operations()
        if op.type == "Placeholder"
        for x in op.outputs
    }
    walk = _Walk({name: i for i, name in enumerate(names)}, kind)
    body = _Body(reader.read_graph_def(optimized), where, memory, "", walk)
    body.run({})
    return body.tally


def is_on_host(name: str) -> bool:
    """Returns whether an operation of a step is what the host does for a stage.

    Of the devices of the trace the host is the first one as well.
    """
    return any(part.startswith("stage_host") for part in name.split("/"))


def _devices_of_operations(graph: tf.Graph, devices: Sequence[str]) -> dict[str, int]:
    """Returns the device of each operation, as TensorFlow places them.

    One that names none is where its first input that has a device is, a constant where
    it is read if that is one device, and any other on the first device.
    """
    index = {name: i for i, name in enumerate(devices)}
    find = colocation.device_finder()
    where: dict[str, int] = {}
    for op in graph.get_operations():
        named = [op.device, *map(find, op.outputs[:1]), *map(find, op.inputs)]
        device = next(filter(None, named), "")
        where[op.name] = index.get(device, HOST if device else 0)
        if is_on_host(op.name):
            where[op.name] = HOST
    for op in graph.get_operations():
        if not op.device and not op.inputs and op.type == "Const":
            readers = {where[reader.name] for reader in op.outputs[0].consumers()}
            if len(readers) == 1:
                (where[op.name],) = readers
    return where


class _Walk:
    """A walk through a step and what it calls, each function once for each device.

    Args:
        index: Devices by the names that operations have for them.
        kind: The type of the devices.
    """

    def __init__(self, index: Mapping[str, int], kind: Literal["GPU", "TPU"]) -> None:
        self._index = index
        self._kind = kind
        self._kernels = tpu_kernels.table() if kind == "TPU" else None
        # Functions have integers in the host's memory, but those of TPUs.
        self._on_host = (*_HANDLES, tf.string, *([tf.int32] * (kind == "GPU")))
        self._tallies: dict[Hashable, tuple[StepTally, list[int]]] = {}

    def kernel(self, node: Any) -> kernels.Kernel | None:
        """Returns the kernel of an operation, or None."""
        return kernels.kernel_for(node, self._kind, self._kernels)

    def passed(self, dtype: tf.DType, device: int) -> int:
        """Returns in whose memory an argument or a result of a function is."""
        return HOST if dtype in self._on_host else device

    def call(
        self,
        graph: reader.FunctionGraph,
        device: int,
        given: Sequence[int],
        results: Mapping[str, int],
        function: str,
    ) -> tuple[StepTally, list[int]]:
        """Returns the tally of a function's call, and the memories of its results.

        Args:
            graph: The body of the function.
            device: The device of the call.
            given: The devices in whose memory its arguments are.
            results: The memory that some results are wanted in.
            function: The name of the outermost function.
        """
        key = (id(graph), device, *given, *results.items(), function)
        if key not in self._tallies:
            where = {
                name: self._index.get(
                    node.device, HOST if "CPU" in node.device else device
                )
                for name, node in graph.nodes.items()
            }
            memory = dict(zip(graph.arguments, given, strict=True))
            body = _Body(graph, where, memory, function, self)
            found = body.run(results)
            self._tallies[key] = body.tally, found
        return self._tallies[key]


class _Body:
    """A graph, or the body of a function for calls on one device.

    Args:
        graph: The graph.
        where: The device of each operation.
        memory: The device in whose memory each argument is.
        function: The name of the function.
        walk: The walk.

    Attributes:
        tally: The effects of running it once.
    """

    def __init__(
        self,
        graph: reader.FunctionGraph,
        where: Mapping[str, int],
        memory: Mapping[str, int],
        function: str,
        walk: _Walk,
    ) -> None:
        self.tally = StepTally(*(collections.Counter() for _ in range(2)))
        self._graph = graph
        self._where = where
        self._memory = dict(memory)
        self._function = function
        self._walk = walk
        self._copied: set[tuple[str, int]] = set()

    def run(self, results: Mapping[str, int]) -> list[int]:
        """Tallies a run, and returns where the results are.

        Args:
            results: The memory that some results are wanted in.
        """
        executed = set(self._graph.executed_operations()) if self._function else None
        for name in self._graph.nodes:
            if executed is None or name in executed:
                self._add(name)
        for tensor, target in results.items():
            if self._graph.tensor(tensor).dtype not in _HANDLES:
                self._move(tensor, target, "result")
        return [results.get(x, self._memory.get(x, HOST)) for x in self._graph.results]

    def _add(self, name: str) -> None:
        graph, node, tally = self._graph, self._graph.nodes[name], self.tally
        inputs, outputs = graph.input_names(name), graph.output_names(name)
        device = self._where[name]
        if not node.device:
            # Where the variable is that it reads or writes.
            resources = (x for x in inputs if graph.tensor(x).dtype == tf.resource)
            device = next((self._memory[x] for x in resources), device)
        if node.op == "Placeholder" or (not self._function and node.op == "NoOp"):
            return
        compiled = node.attr["_XlaMustCompile"].b
        if node.op in _CALLS and not compiled:
            self._call(name, device)
            return
        kernel = None
        if device != HOST:
            kernel = None if compiled else self._walk.kernel(node)
            if kernel is None and node.op not in _NO_KERNEL_NEEDED:
                tally.on_host[self._operation(name)] += 1
        taken, made = graph.argument_names(name)
        on_host = frozenset([*taken, *made])
        if kernel or (compiled and device != HOST):
            on_host = kernel.host_arguments if kernel else frozenset()
        for tensor, argument in zip(inputs, taken, strict=True):
            if graph.tensor(tensor).dtype in _HANDLES:
                continue
            target = HOST if argument in on_host else device
            self._move(tensor, target, f"{name}({argument})")
        for tensor, argument in zip(outputs, made, strict=True):
            self._memory[tensor] = HOST if argument in on_host else device

    def _call(self, name: str, device: int) -> None:
        """Adds the functions that an operation calls: a loop's as often as it runs.

        Conditionals and loops are lowered: their arguments stay where they are, and
        only the condition is needed on the host.
        """
        graph, node, walk = self._graph, self._graph.nodes[name], self._walk
        inputs, outputs = graph.input_names(name), graph.output_names(name)
        lowered = node.op in _LOWERED
        if node.op in reader.BRANCHES:
            self._move(inputs[0], HOST, f"{name}(cond)")
            inputs = inputs[1:]
        given = []
        for tensor in inputs:
            dtype = graph.tensor(tensor).dtype
            there = self._memory.get(tensor, device)
            target = there if lowered else walk.passed(dtype, device)
            if dtype not in _HANDLES:
                self._move(tensor, target, name)
            given.append(target)
        results: list[int] = []
        times = graph.loop(name).num_trips() if node.op in reader.LOOPS else 1
        for body in graph.called_functions(name):
            targets: Mapping[str, int] = {}
            if node.op in reader.LOOPS and len(body.results) == 1:
                targets = {body.results[0]: HOST}  # The condition, or all there is.
            elif not lowered:
                types = {x: body.tensor(x).dtype for x in body.results}
                targets = {x: walk.passed(dtype, device) for x, dtype in types.items()}
            label = self._function or without_number(name)
            tally, results = walk.call(body, device, given, targets, label)
            self.tally.add(tally, times)
        for i, tensor in enumerate(outputs):
            kept = lowered and i < len(results)
            dtype = graph.tensor(tensor).dtype
            self._memory[tensor] = results[i] if kept else walk.passed(dtype, device)

    def _move(self, tensor: str, target: int, reader: str) -> None:
        """Adds the copy of a tensor, unless it is there."""
        source = self._memory.get(tensor, target)
        if source == target or (tensor, target) in self._copied:
            return
        self._copied.add((tensor, target))
        made, _, _ = tensor.rpartition(":")
        if made in self._graph.nodes:
            operation = self._operation(made)
        else:
            name = reader.partition("(")[0]
            operation = Operation(name, "", (), self._function, target)
        size = num_bytes(self._graph.tensor(tensor))
        self.tally.copies[Copy(operation, reader, size, source, target)] += 1

    def _operation(self, name: str) -> Operation:
        node = self._graph.nodes[name]
        dtypes = tuple(x.dtype.name for x in self._graph.input_tensors(name))
        return Operation(name, node.op, dtypes, self._function, self._where[name])


def without_number(name: str) -> str:
    """Returns the name of an operation, as of a call, without its number."""
    return re.sub(r"_\d+$", "", name)
