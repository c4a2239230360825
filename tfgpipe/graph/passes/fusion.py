"""Chains of elementwise operations and reductions, each compiled into one kernel.

TensorFlow's kernels for CPUs pass through memory once for each operation. XLA compiles
a chain of operations into a kernel that passes through memory once:

    x ─▶ Mul ─▶ Neg ─▶ Erfc ─▶ Mul ─▶ y        four passes
    x ─▶ gelu ─▶ y                             one

Matrix products, convolutions and random numbers stay with TensorFlow. The operations
between them are grouped by how many of those lie before them on the longest path, so
that no chain waits for itself.

The forward and the gradient have chains of their own. What a chain of the gradient
reads from the inside of a chain of the forward it computes again, which costs less than
to write and to read it, except for short results, such as the mean of each row. So the
forward keeps less for the backward.

Equal chains share one function, which XLA compiles once on each device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.graph import partitioner
from tfgpipe.graph.joint_graph import JointGraph

# Without arithmetic: the result is the input, in another shape.
_COPIES = ("ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient")
_REDUCTIONS = ("All", "Any", "Max", "Mean", "Min", "Prod", "Sum")
_ELEMENTWISE = (
    *("Abs", "Add", "AddN", "AddV2", "BiasAdd", "BroadcastTo", "Cast", "Cos", "Div"),
    *("DivNoNan", "Elu", "EluGrad", "Equal", "Erf", "Erfc", "Exp", "Expm1", "Fill"),
    *("Greater", "GreaterEqual", "LeakyRelu", "LeakyReluGrad", "Less", "LessEqual"),
    *("Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum"),
    *("Mul", "MulNoNan", "Neg", "NotEqual", "OnesLike", "Pow", "RealDiv"),
    *("Reciprocal", "ReciprocalGrad", "Relu", "Relu6", "Relu6Grad", "ReluGrad"),
    *("Rsqrt", "RsqrtGrad", "Select", "SelectV2", "Selu", "SeluGrad", "Sigmoid"),
    *("SigmoidGrad", "Sign", "Sin", "Softplus", "SoftplusGrad", "Softsign"),
    *("SoftsignGrad", "Sqrt", "SqrtGrad", "Square", "SquaredDifference", "Sub"),
    *("Tanh", "TanhGrad", "Tile", "Xdivy", "Xlogy", "ZerosLike"),
)
_FUSED = frozenset((*_COPIES, *_REDUCTIONS, *_ELEMENTWISE))
# TensorFlow itself fuses a bias and an activation into the product before them.
_PRODUCTS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative", "MatMul")
_FUSED_INTO_PRODUCTS = ("Elu", "LeakyRelu", "Relu", "Relu6")
# A chain has to save the writing of as many numbers to pay for its call:
# `python -m benchmarks.studies.fusion`.
MIN_SAVED_ELEMENTS = 2**18
# A result of at most this part of the largest in its chain is short.
_SHORT = 1 / 8
# Constants of more numbers are given to a chain.
_MOST_CONSTANT = 1024
_DTYPES = (tf.float32, tf.float64, tf.bool)

# Functions of chains, by what they compute.
ChainCache = MutableMapping[bytes, Any]


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Operations to compile into one function.

    Attributes:
        operations: Their names, in an order in which they can run.
        inputs: Names of the tensors that they take from outside.
        outputs: Names of those that others take.
    """

    operations: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def fuse_chains(joint: JointGraph, *, cache: ChainCache) -> JointGraph:
    """Returns a joint graph whose chains are each one compiled function.

    Chains depend on the graph alone, never on measured time: a run that is started
    again has to compute the same bits.

    Args:
        joint: The joint graph.
        cache: Functions to share. New ones are added.
    """
    if not has_xla():
        return joint
    search = _Search(joint)
    found: dict[str, str] = {}
    for chain in search.chains():
        function = search.function(chain, cache)
        with joint.graph.as_default():
            inputs = (found.get(name, name) for name in chain.inputs)
            tensors = map(joint.graph.get_tensor_by_name, inputs)
            results = function(*map(_without_useless_gradient, tensors))
        names = (result.name for result in results)
        found.update(zip(chain.outputs, names, strict=True))
        call = results[0].op.name
        for name in chain.operations:
            found.setdefault(f"^{name}", f"^{call}")
    return joint.rewritten(found) if found else joint


def _without_useless_gradient(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor for a call, without a gradient if its type has none.

    The gradient of a call has one even there, and TensorFlow passes it on to operations
    that have no gradient, such as `IsFinite`.
    """
    return x if x.dtype.is_floating else tf.stop_gradient(x)


@functools.cache
def has_xla() -> bool:
    """Returns whether XLA compiles for CPUs; that of `tensorflow-tpu` does not."""
    with tf.init_scope(), tf.device("CPU:0"):
        try:
            tf.function(tf.identity, autograph=False, jit_compile=True)(tf.zeros([]))
        except tf.errors.OpError:
            return False
    return True


class _Search:
    """Finds the chains of a graph.

    Every operation of a chain has one result, so names of operations do for both.
    """

    def __init__(self, joint: JointGraph) -> None:
        self._graph = joint.graph
        self._ops = {op.name: op for op in joint.graph.get_operations()}
        # Equal layers have their operations in the same order.
        self._traced = {
            x.name: i for i, op in enumerate(self._ops.values()) for x in op.outputs
        }
        self._fetches = {*joint.forward_results, *joint.backward_results}
        self._inputs = {name: joint.inputs_of(name) for name in self._ops}
        order = joint.edges
        needed = partitioner.subgraph(order, fetches=self._fetches, feeds=())
        forward = partitioner.subgraph(order, fetches=joint.forward_results, feeds=())
        self._needed = [name for name in order if name in needed.operations]
        self._invariant = self._depending_alone_on(
            {
                *map(partitioner.op_name, joint.invariant),
                *(name for name in self._needed if self._ops[name].type == "Const"),
            }
        )
        self._in_gradient = self._depending_on(
            set(map(partitioner.op_name, joint.backward.given))
        )
        self._in_forward = forward.operations - self._in_gradient
        self._fusible: set[str] = set()
        self._in_products: set[str] = set()
        for name in self._needed:
            if self._is_in_product(name):
                self._in_products.add(name)
            elif name not in self._invariant and self._can_be_fused(name):
                self._fusible.add(name)
        # Of neither: computed of the forward's tensors, and read by the gradient.
        self._for_gradient = self._fusible - self._in_gradient - self._in_forward
        # One that is fused waits for nothing but what it reads.
        self._waits = {
            name: {
                partitioner.op_name(tensor)
                for tensor in (self._inputs if name in self._fusible else order)[name]
            }
            for name in self._needed
        }
        self._readers: dict[str, list[str]] = {}
        for name in self._needed:
            for tensor in self._inputs[name]:
                self._readers.setdefault(tensor, []).append(name)

    def chains(self) -> Iterator[_Chain]:
        """Yields the chains, each after those that it reads."""
        groups = self._groups()
        forward = [
            group
            for group in groups
            if group[0] in self._in_forward and self._is_profitable(group)
        ]
        gradient = [
            group
            for group in groups
            if group[0] in self._in_gradient
            and self._is_profitable(self._with_own(group))
        ]
        # What these alone read of the forward, they compute again.
        in_gradient = set(self._with_own([x for group in gradient for x in group]))
        repeatable = in_gradient.difference(*gradient)
        written: set[str] = set()
        for group in forward:
            outputs = self._outputs(group, in_gradient)
            written.update(outputs)
            repeatable.update(group)
            yield self._chain(group, outputs)
        for group in gradient:
            repeated = self._repeated(group, repeatable, written)
            yield self._chain([*group, *repeated], self._outputs(group))

    def _readers_of(self, name: str) -> list[str]:
        """Returns the readers of an operation; the caller of the graph is ""."""
        result = self._ops[name].outputs[0].name
        caller = [""] if result in self._fetches else []
        return [*self._readers.get(result, ()), *caller]

    def _depending_alone_on(self, names: set[str]) -> set[str]:
        found = set(names)
        for name in self._needed:
            behind = set(map(partitioner.op_name, self._inputs[name]))
            if behind and behind <= found and not self._ops[name].op_def.is_stateful:
                found.add(name)
        return found

    def _depending_on(self, names: set[str]) -> set[str]:
        found = set(names)
        for name in self._needed:
            if not found.isdisjoint(map(partitioner.op_name, self._inputs[name])):
                found.add(name)
        return found

    def _is_in_product(self, name: str) -> bool:
        """Returns whether TensorFlow fuses an operation into the product before it."""
        if self._ops[name].type not in ("BiasAdd", *_FUSED_INTO_PRODUCTS):
            return False
        before = partitioner.op_name(self._inputs[name][0])
        if self._ops[name].type == "BiasAdd":
            return self._ops[before].type in _PRODUCTS
        return before in self._in_products

    def _can_be_fused(self, name: str) -> bool:
        op = self._ops[name]
        tensors = [*op.inputs, *op.outputs]
        return (
            op.type in _FUSED
            and not op.device
            and not any(other.op_def.is_stateful for other in op.control_inputs)
            and all(x.shape.is_fully_defined() for x in tensors)
            and all(
                x.dtype in _DTYPES or tf.get_static_value(x) is not None
                for x in tensors
            )
        )

    def _groups(self) -> list[list[str]]:
        """Returns connected operations with equally many others before them."""
        depths: dict[str, int] = {}
        groups: dict[str, list[str]] = {}
        for name in self._needed:
            depth = max((depths[other] for other in self._waits[name]), default=0)
            if name in self._invariant:
                depth = 0
            elif name not in self._fusible:
                depth += 1
            depths[name] = depth
            if name not in self._fusible or not (
                name in self._in_gradient or name in self._in_forward
            ):
                continue
            groups[name] = [name]
            for other in sorted(self._waits[name] & groups.keys()):
                mine, theirs = groups[name], groups[other]
                if (
                    mine is not theirs
                    and depths[other] == depth
                    and (other in self._in_gradient) == (name in self._in_gradient)
                ):
                    theirs.extend(mine)
                    groups.update(dict.fromkeys(mine, theirs))
        found = {id(group): group for group in groups.values()}.values()
        return sorted(found, key=lambda group: depths[group[0]])

    def _with_own(self, group: Sequence[str]) -> list[str]:
        """Returns operations of the gradient with those that they alone read."""
        members = dict.fromkeys(group)
        pending = list(group)
        while pending:
            for name in map(partitioner.op_name, self._inputs[pending.pop()]):
                is_new = name in self._for_gradient and name not in members
                if is_new and members.keys() >= set(self._readers_of(name)):
                    members[name] = None
                    pending.append(name)
        return list(members)

    def _is_profitable(self, group: Sequence[str]) -> bool:
        """Returns whether fusing a group saves more than the call costs."""
        arithmetic = [name for name in group if self._ops[name].type not in _COPIES]
        outputs = {partitioner.op_name(tensor) for tensor in self._outputs(group)}
        saved = sum(self._size(x) for x in arithmetic if x not in outputs)
        return len(arithmetic) > 1 and saved >= MIN_SAVED_ELEMENTS

    def _outputs(
        self, group: Sequence[str], in_gradient: Collection[str] = ()
    ) -> list[str]:
        """Returns the results of a group that others read.

        Args:
            group: The group.
            in_gradient: Operations that compute again what is long.
        """
        members = set(group)
        largest = max(map(self._size, group))
        found: dict[str, None] = {}
        for name in group:
            others = [x for x in self._readers_of(name) if x not in members]
            if self._size(name) > _SHORT * largest:
                others = [x for x in others if x not in in_gradient]
            # Others read a copy of what that is a copy of.
            while others and name in members:
                result = self._ops[name].outputs[0].name
                if self._ops[name].type not in _COPIES:
                    found[result] = None
                    break
                name = partitioner.op_name(self._inputs[name][0])
        return sorted(found, key=self._traced.__getitem__)

    def _size(self, name: str) -> int:
        return math.prod(self._ops[name].outputs[0].shape)

    def _repeated(
        self,
        group: Sequence[str],
        repeatable: Collection[str],
        written: Collection[str],
    ) -> list[str]:
        """Returns the operations that a group of the gradient computes again."""
        found: dict[str, None] = {}
        pending = [tensor for name in group for tensor in self._inputs[name]]
        while pending:
            tensor = pending.pop()
            name = partitioner.op_name(tensor)
            if name in repeatable and tensor not in written and name not in found:
                found[name] = None
                pending.extend(self._inputs[name])
        return list(found)

    def _chain(self, operations: Sequence[str], outputs: Sequence[str]) -> _Chain:
        """Returns a chain of those operations that outputs depend on.

        It has them in an order that is the same wherever they are in the graph.
        """
        members = set(operations)
        order: dict[str, None] = {}

        pending = [partitioner.op_name(tensor) for tensor in reversed(outputs)]
        while pending:
            behind = map(partitioner.op_name, self._inputs[pending[-1]])
            first = [x for x in behind if x in members and x not in order]
            if first:
                pending.extend(reversed(first))
            else:
                order[pending.pop()] = None
        read = dict.fromkeys(x for name in order for x in self._inputs[name])
        inputs = (
            x
            for x in read
            if partitioner.op_name(x) not in order and self._constant(x) is None
        )
        return _Chain(tuple(order), tuple(inputs), tuple(outputs))

    def _constant(self, tensor: str) -> Any:
        """Returns the value of a tensor that is constant and small, or None."""
        known = self._graph.get_tensor_by_name(tensor)
        size = known.shape.num_elements()
        if size is None or size > _MOST_CONSTANT:
            return None
        return tf.get_static_value(known)

    def function(self, chain: _Chain, cache: ChainCache) -> Any:
        """Returns the compiled function of a chain, one for all that are equal."""
        graph_def = tf.compat.v1.GraphDef()
        names = {tensor: f"x{i}" for i, tensor in enumerate(chain.inputs)}
        for name in chain.operations:
            for tensor in self._inputs[name]:
                if tensor not in names:
                    names[tensor] = f"x{len(names)}"
                    x = self._graph.get_tensor_by_name(tensor)
                    node = graph_def.node.add(name=names[tensor], op="Const")
                    node.attr["dtype"].type = x.dtype.as_datatype_enum
                    node.attr["value"].tensor.CopyFrom(
                        tf.make_tensor_proto(self._constant(tensor), x.dtype, x.shape)
                    )
            op = self._ops[name]
            node = graph_def.node.add()
            node.CopyFrom(op.node_def)
            functions.forget_trace(node)
            names[op.outputs[0].name] = node.name = f"x{len(names)}"
            node.input[:] = [names[tensor] for tensor in self._inputs[name]]
        specs = [
            tf.TensorSpec(x.shape, x.dtype)
            for x in map(self._graph.get_tensor_by_name, chain.inputs)
        ]
        results = [f"{names[output]}:0" for output in chain.outputs]
        key = graph_def.SerializeToString(deterministic=True)
        key += repr((specs, results)).encode()
        if key not in cache:

            def fused(*tensors: tf.Tensor) -> list[tf.Tensor]:
                given = {f"x{i}:0": tensor for i, tensor in enumerate(tensors)}
                return tf.graph_util.import_graph_def(
                    graph_def, input_map=given, return_elements=results, name=""
                )

            with tf.init_scope():
                cache[key] = tf.function(
                    fused, autograph=False, jit_compile=True
                ).get_concrete_function(*specs)
        return cache[key]
