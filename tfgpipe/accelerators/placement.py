"""Where the operations of a step run on GPUs, and what is copied for them.

The step is traced on the devices that there are. Its operations name their device, so
that those of the first stage are on the first GPU, and so on. What TensorFlow then does
follows from the kernels that are registered for GPUs, which its wheel has:

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
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe._compat import kernels
from tfgpipe._util import num_bytes
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
_ON_HOST = (tf.int32, tf.string, tf.resource, tf.variant)


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
        operation: What makes it, or what reads it if it is an argument of a function.
        reader: What reads it first: the operation, with the name of its argument.
        num_bytes: Its size.
        source: The device in whose memory it is, or `HOST`.
        target: Where it is copied.
    """

    operation: Operation
    reader: str
    num_bytes: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """What runs where in a step, and what is copied.

    Attributes:
        on_host: Operations of devices that have no kernel for their types there, with
            how often they run in a step.
        copies: What is copied, with how often in a step.
        num_operations: How many operations run on each device in a step.
    """

    on_host: Mapping[Operation, int]
    copies: Mapping[Copy, int]
    num_operations: Mapping[int, int]


def place(
    graph: tf.Graph, optimized: Any, devices: Sequence[str], names: Sequence[str]
) -> Placement:
    """Returns what runs where if each device of a step were a GPU.

    Args:
        graph: The graph of a step, of known shapes.
        optimized: It as a `GraphDef`, with the functions that it calls optimized.
        devices: The names of the devices, as operations of the graph name them.
        names: The names of the devices in its place.
    """
    tally = _Tally()
    where = _devices_of_operations(graph, devices)
    arguments = {
        x.name: where[x.op.name] if x.dtype == tf.resource else HOST
        for op in graph.get_operations()
        if op.type == "Placeholder"
        for x in op.outputs
    }
    index = {name: i for i, name in enumerate(names)}
    _Body(reader.read_graph_def(optimized), where, arguments, "", index, tally).run(
        1, {}
    )
    return Placement(tally.on_host, tally.copies, tally.num_operations)


def between_devices(placed: Placement) -> Placement:
    """Returns what is copied from device to device alone."""
    copies = {
        copy: times
        for copy, times in placed.copies.items()
        if HOST not in (copy.source, copy.target)
    }
    return Placement({}, copies, placed.num_operations)


def is_on_host(name: str) -> bool:
    """Returns whether an operation of a step is what the host does for a stage.

    Of the devices of the trace the host is the first one as well.
    """
    return name.rpartition("/")[2].startswith("stage_host")


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


class _Tally:
    """How often operations run, and tensors are copied."""

    def __init__(self) -> None:
        self.on_host: collections.Counter[Operation] = collections.Counter()
        self.copies: collections.Counter[Copy] = collections.Counter()
        self.num_operations: collections.Counter[int] = collections.Counter()


class _Body:
    """A graph, or the body of a function for calls on one device.

    Args:
        graph: It.
        where: The device of each operation.
        memory: The device in whose memory each argument is.
        function: The name of the function.
        index: Devices by the names that operations have for them.
        tally: Is added to.
    """

    def __init__(
        self,
        graph: reader.FunctionGraph,
        where: Mapping[str, int],
        memory: Mapping[str, int],
        function: str,
        index: Mapping[str, int],
        tally: _Tally,
    ) -> None:
        self._graph = graph
        self._where = where
        self._memory = dict(memory)
        self._function = function
        self._index = index
        self._tally = tally
        self._copied: set[tuple[str, int]] = set()

    def run(self, times: int, results: Mapping[str, int]) -> list[int]:
        """Adds what running it so often does, and returns where its results are.

        Args:
            times: How often.
            results: In whose memory some results are to be.
        """
        executed = set(self._graph.executed_operations()) if self._function else None
        for name in self._graph.nodes:
            if executed is None or name in executed:
                self._add(name, times)
        for tensor, target in results.items():
            if self._graph.tensor(tensor).dtype not in _HANDLES:
                self._move(tensor, target, "result", times)
        return [results.get(x, self._memory.get(x, HOST)) for x in self._graph.results]

    def _add(self, name: str, times: int) -> None:
        graph, node, tally = self._graph, self._graph.nodes[name], self._tally
        inputs, outputs = graph.input_names(name), graph.output_names(name)
        device = self._where[name]
        if not node.device:
            # Where the variable is that it reads or writes.
            resources = (x for x in inputs if graph.tensor(x).dtype == tf.resource)
            device = next((self._memory[x] for x in resources), device)
        if node.op == "Placeholder" or (not self._function and node.op == "NoOp"):
            return
        if node.op in _CALLS:
            self._call(name, device, times)
            return
        kernel = None if device == HOST else kernels.kernel_for(node, "GPU")
        if device != HOST:
            tally.num_operations[device] += times
            if kernel is None and node.op not in _NO_KERNEL_NEEDED:
                tally.on_host[self._operation(name)] += times
        taken, made = graph.argument_names(name)
        on_host = kernel.host_arguments if kernel else frozenset([*taken, *made])
        for tensor, argument in zip(inputs, taken, strict=True):
            if graph.tensor(tensor).dtype in _HANDLES:
                continue
            target = HOST if argument in on_host else device
            self._move(tensor, target, f"{name}({argument})", times)
        for tensor, argument in zip(outputs, made, strict=True):
            self._memory[tensor] = HOST if argument in on_host else device

    def _call(self, name: str, device: int, times: int) -> None:
        """Adds the functions that an operation calls: a loop's as often as it runs.

        Conditionals and loops are lowered: their arguments stay where they are, and
        only the condition is needed on the host.
        """
        graph, node = self._graph, self._graph.nodes[name]
        inputs, outputs = graph.input_names(name), graph.output_names(name)
        lowered = node.op in _LOWERED
        if node.op in reader.BRANCHES:
            self._move(inputs[0], HOST, f"{name}(cond)", times)
            inputs = inputs[1:]
        given = []
        for tensor in inputs:
            dtype = graph.tensor(tensor).dtype
            there = self._memory.get(tensor, device)
            target = there if lowered else _passed(dtype, device)
            if dtype not in _HANDLES:
                self._move(tensor, target, name, times)
            given.append(target)
        results: list[int] = []
        if node.op in reader.LOOPS:
            times *= graph.loop(name).num_trips()
        for body in graph.called_functions(name):
            memory = dict(zip(body.arguments, given, strict=True))
            targets: Mapping[str, int] = {}
            if node.op in reader.LOOPS and len(body.results) == 1:
                targets = {body.results[0]: HOST}  # The condition, or all there is.
            elif not lowered:
                types = {x: body.tensor(x).dtype for x in body.results}
                targets = {x: _passed(dtype, device) for x, dtype in types.items()}
            where = {
                n: self._index.get(
                    node.device, HOST if "CPU" in node.device else device
                )
                for n, node in body.nodes.items()
            }
            inner = _Body(
                body,
                where,
                memory,
                self._function or _kind(name),
                self._index,
                self._tally,
            )
            results = inner.run(times, targets)
        for i, tensor in enumerate(outputs):
            kept = lowered and i < len(results)
            dtype = graph.tensor(tensor).dtype
            self._memory[tensor] = results[i] if kept else _passed(dtype, device)

    def _move(self, tensor: str, target: int, reader: str, times: int) -> None:
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
        self._tally.copies[Copy(operation, reader, size, source, target)] += times

    def _operation(self, name: str) -> Operation:
        node = self._graph.nodes[name]
        dtypes = tuple(x.dtype.name for x in self._graph.input_tensors(name))
        return Operation(name, node.op, dtypes, self._function, self._where[name])


def _kind(name: str) -> str:
    """Returns the name of a call without its number."""
    return re.sub(r"_\d+$", "", name)


def _passed(dtype: tf.DType, device: int) -> int:
    """Returns in whose memory an argument or a result of a function is."""
    return HOST if dtype in _ON_HOST else device
