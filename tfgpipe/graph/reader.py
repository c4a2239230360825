"""Reads traced graphs: shapes, called functions, trip counts of loops.

A graph calls functions: for a `tf.function` in a layer, for each branch of a
conditional, for the body of a loop. Here each is read as a graph of its own, by public
means, with the shapes of its tensors and those integers that are known before anything
runs, from which the trip count of a loop may follow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.graph import partitioner

Shape = tuple[int, ...]

LOOPS = ("While", "StatelessWhile")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
# Whether the operand that must be less comes first (1) or last (-1).
_COMPARISON_SIGNS = {"Less": 1, "LessEqual": 1, "Greater": -1, "GreaterEqual": -1}
# The sign of the second operand.
_ADDITION_SIGNS = {"Add": 1, "AddV2": 1, "Sub": -1}


def read_graph(graph: tf.Graph) -> FunctionGraph:
    """Returns a graph with all that it calls."""
    return read_graph_def(graph.as_graph_def(add_shapes=True))


def read_graph_def(graph_def: Any) -> FunctionGraph:
    """Returns a graph, whose operations have the shapes of their results as well."""
    return FunctionGraph(_FunctionLibrary(graph_def), graph_def.node)


class _FunctionLibrary:
    """The functions that a graph may call, and the results of its operations.

    Inside a function an input is written `operation:result:index`. Which results a
    type of operation has is public only in a `MetaGraphDef`, for the operations of the
    graph itself. So one is made of a graph with an operation of each type.
    """

    def __init__(self, graph_def: tf.compat.v1.GraphDef) -> None:
        self._functions = {f.signature.name: f for f in graph_def.library.function}
        self._bodies: dict[Any, FunctionGraph] = {}
        inner = (f.node_def for f in graph_def.library.function)
        types = {node.op for nodes in (graph_def.node, *inner) for node in nodes}
        each = [tf.compat.v1.NodeDef(name=op, op=op) for op in types]
        meta = tf.compat.v1.train.export_meta_graph(
            graph_def=tf.compat.v1.GraphDef(node=each), graph=tf.Graph()
        )
        self._signatures = {
            signature.name: signature
            for signature in meta.meta_info_def.stripped_op_list.op
        }

    def results(self, node: Any) -> Iterator[tuple[str, int]]:
        """Yields the name and the type of each tensor that an operation returns."""
        for result in self._signatures[node.op].output_arg:
            for index, dtype in enumerate(_types(result, node)):
                yield f"{node.name}:{result.name}:{index}", dtype

    def argument_names(self, node: Any) -> tuple[list[str], list[str]]:
        """Returns the name of the argument that each input and each output is of."""
        signature = self._signatures[node.op]
        inputs, outputs = (
            [each.name for each in some for _ in _types(each, node)]
            for some in (signature.input_arg, signature.output_arg)
        )
        return inputs, outputs

    def body(self, function: str, values: Sequence[int | None] = ()) -> FunctionGraph:
        """Returns the body of a function for known values of its arguments."""
        key = (function, *values)
        if key not in self._bodies:
            f = self._functions[function]
            self._bodies[key] = FunctionGraph(self, f.node_def, f, values)
        return self._bodies[key]


class Tensor:
    """Shape and dtype of a tensor of the graph."""

    def __init__(self, shape: Any, dtype: int) -> None:
        self.shape = tuple(1 if d.size < 0 else d.size for d in shape.dim)
        self.dtype = tf.as_dtype(dtype)
        self.floating = self.dtype.is_floating or self.dtype.is_complex


class FunctionGraph:
    """A graph, or the body of a function for a call of it.

    Attributes:
        nodes: The operations by name.
        arguments: The tensors it takes, by the names that `graph.partitioner` calls
            canonical.
        results: The tensors it returns.
    """

    def __init__(
        self,
        library: _FunctionLibrary,
        nodes: Iterable[Any],
        function: Any = None,
        values: Sequence[int | None] = (),
    ) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.arguments: list[str] = []
        self.results: list[str] = []
        self._library = library
        self._tensors: dict[str, Tensor] = {}
        self._outputs: dict[str, list[str]] = {}
        self._effects: list[str] = []
        names: dict[str, str] = {}

        def canonical(tensors: Iterable[str]) -> list[str]:
            return [names.get(x, partitioner.canonical(x)) for x in tensors]

        for name, node in self.nodes.items():
            shapes = _shapes(functions.output_shapes(node))
            outputs = self._outputs[name] = []
            for result, dtype in library.results(node):
                names[result] = f"{name}:{len(outputs)}"
                outputs.append(names[result])
                self._tensors[names[result]] = Tensor(next(shapes), dtype)
        if function is not None:
            signature = function.signature
            taken, returned = signature.input_arg, signature.output_arg
            self.arguments = canonical(argument.name for argument in taken)
            self.results = canonical(function.ret[result.name] for result in returned)
            self._effects = [f"^{name}" for name in function.control_ret.values()]
            shapes = _shapes(functions.input_shapes(function))
            for tensor, argument in zip(self.arguments, taken, strict=True):
                self._tensors[tensor] = Tensor(next(shapes), argument.type)
        self._inputs = {n: canonical(node.input) for n, node in self.nodes.items()}
        self._values = dict(itertools.zip_longest(self.arguments, values))

    def executed_operations(self) -> Collection[str]:
        """Returns the names of the operations that a call executes."""
        fetches = (*self.results, *self._effects)
        return partitioner.subgraph(
            self._inputs, fetches=fetches, feeds=self.arguments
        ).operations

    def input_tensors(self, name: str) -> list[Tensor]:
        """Returns the input tensors of an operation."""
        return [self._tensors[tensor] for tensor in self.input_names(name)]

    def output_tensors(self, name: str) -> list[Tensor]:
        """Returns the output tensors of an operation."""
        return [self._tensors[tensor] for tensor in self._outputs[name]]

    def input_names(self, name: str) -> list[str]:
        """Returns the names of the tensors that an operation reads."""
        return [tensor for tensor in self._inputs[name] if not tensor.startswith("^")]

    def output_names(self, name: str) -> list[str]:
        """Returns the names of the tensors that an operation returns."""
        return self._outputs[name]

    def argument_names(self, name: str) -> tuple[list[str], list[str]]:
        """Returns the name of the argument that each input and each output is of."""
        return self._library.argument_names(self.nodes[name])

    def tensor(self, name: str) -> Tensor:
        """Returns the tensor of a name."""
        return self._tensors[name]

    def copied_from(self, tensor: str) -> tuple[str, str]:
        """Follows copies of a tensor: returns the source and its operation's type."""
        node = self.nodes.get(partitioner.op_name(tensor))
        if node is not None and node.op == "Identity":
            return self.copied_from(self.input_names(node.name)[0])
        return tensor, "" if node is None else node.op

    def static_integer(self, tensor: str) -> int | None:
        """Returns the value of an integer tensor if known before the graph runs."""
        if tensor not in self._values:
            known = self._tensors[tensor]
            single = known.dtype.is_integer and math.prod(known.shape) == 1
            self._values[tensor] = self._constant(tensor) if single else None
        return self._values[tensor]

    def _constant(self, tensor: str) -> int | None:
        name = partitioner.op_name(tensor)
        node, index = self.nodes[name], self._outputs[name].index(tensor)
        if node.op == "Const":
            return tf.make_ndarray(node.attr["value"].tensor).item()
        if node.op in ("Cast", "Identity", "Max", "Reshape", "Squeeze"):
            return self.static_integer(self.input_names(name)[0])  # The same integer.
        if node.op in _ADDITION_SIGNS:
            left, right = map(self.static_integer, self.input_names(name))
            if left is not None and right is not None:
                return left + _ADDITION_SIGNS[node.op] * right
        if node.op == "StridedSlice":
            vector, begin = self.input_names(name)[:2]
            return self._element(vector, self.static_integer(begin))
        if node.op in LOOPS:
            return self.loop(name).final_value(index)
        if len(calls := self.called_functions(name)) == 1:
            return calls[0].static_integer(calls[0].results[index])
        return None

    def _element(self, vector: str, index: int | None) -> int | None:
        """Returns a number of a vector that is constant or the shape of a tensor."""
        vector, op = self.copied_from(vector)
        elements: Sequence[int] = ()
        if op == "Const":
            value = self.nodes[partitioner.op_name(vector)].attr["value"].tensor
            elements = tf.make_ndarray(value).tolist()
        elif op == "Shape":
            described, *_ = self.input_names(partitioner.op_name(vector))
            elements = self._tensors[described].shape
        if index is None or not -len(elements) <= index < len(elements):
            return None
        return elements[index]

    def called_functions(self, name: str) -> list[FunctionGraph]:
        """Returns the bodies of the functions that an operation calls."""
        node = self.nodes[name]
        functions = [
            function.name
            for attribute in node.attr.values()
            for function in (attribute.func, *attribute.list.func)
            if function.name
        ]
        if not functions:  # Evaluates no inputs.
            return []
        values = [self.static_integer(tensor) for tensor in self.input_names(name)]
        taken = values[1:] if node.op in BRANCHES else values
        return [self._library.body(function, taken) for function in functions]

    def loop(self, name: str) -> Loop:
        """Returns the loop that an operation is."""
        attr = self.nodes[name].attr
        starts = [self.static_integer(tensor) for tensor in self.input_names(name)]
        changes = Loop.increments(self._library.body(attr["body"].func.name))
        fixed = [s if c == 0 else None for s, c in zip(starts, changes, strict=True)]
        condition = self._library.body(attr["cond"].func.name, fixed)
        body = self._library.body(attr["body"].func.name, fixed)
        return Loop(starts, condition, body)


class Loop:
    """A loop: what its variables start from, its condition and its body."""

    def __init__(
        self,
        initial_values: Sequence[int | None],
        condition: FunctionGraph,
        body: FunctionGraph,
    ) -> None:
        self.body = body
        self._condition = condition
        self._variables = list(zip(initial_values, self.increments(body), strict=True))

    @staticmethod
    def increments(body: FunctionGraph) -> list[int | None]:
        """Returns, for each loop variable, its increment per trip, or None."""
        found: list[int | None] = []
        for before, result in zip(body.arguments, body.results, strict=True):
            after, op = body.copied_from(result)
            step = None
            if op in _ADDITION_SIGNS:
                first, second = body.input_names(partitioner.op_name(after))
                if op != "Sub" and body.copied_from(second)[0] == before:
                    first, second = second, first
                if body.copied_from(first)[0] == before:
                    step = body.static_integer(second)
            found.append(0 if after == before else step and step * _ADDITION_SIGNS[op])
        return found

    def final_value(self, index: int) -> int | None:
        """Returns the final value of a loop variable, or None."""
        start, change = self._variables[index]
        if start is None or change is None:
            return None
        return start + change * self.num_trips()

    def num_trips(self) -> int:
        """Returns the number of trips; 1 if it is not known."""
        found = []
        for comparison in self._comparisons(self._condition.results[0]):
            op = self._condition.nodes[comparison].op
            sides = map(self._side, self._condition.input_names(comparison))
            (low, rise), (high, fall) = list(sides)[:: _COMPARISON_SIGNS[op]]
            if low is None or rise is None or high is None or fall is None:
                continue
            if rise > fall:
                away = high - low + op.endswith("Equal")
                found.append(max(0, math.ceil(away / (rise - fall))))
        return min(found, default=1)

    def _comparisons(self, tensor: str) -> Iterator[str]:
        condition, op = self._condition.copied_from(tensor)
        if op == "LogicalAnd":
            for operand in self._condition.input_names(partitioner.op_name(condition)):
                yield from self._comparisons(operand)
        elif op in _COMPARISON_SIGNS:
            yield partitioner.op_name(condition)

    def _side(self, tensor: str) -> tuple[int | None, int | None]:
        """Returns the start of one side of a comparison and its step in each trip."""
        tensor, _ = self._condition.copied_from(tensor)
        if tensor in self._condition.arguments:
            return self._variables[self._condition.arguments.index(tensor)]
        return self._condition.static_integer(tensor), 0


def _types(argument: Any, node: Any) -> Sequence[int]:
    """Returns the types of the tensors that an argument of an operation stands for."""
    if argument.type_list_attr:
        types: Sequence[int] = node.attr[argument.type_list_attr].list.type
        return types
    number = node.attr[argument.number_attr].i if argument.number_attr else 1
    return [argument.type or node.attr[argument.type_attr].type] * number


def _shapes(attribute: Any) -> Iterator[Any]:
    """Yields the shapes in an attribute, and unknown ones after them."""
    unknown = tf.TensorShape(None).as_proto()
    return itertools.chain(attribute.list.shape, itertools.repeat(unknown))
