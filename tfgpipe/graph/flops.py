"""How many floating point operations a traced graph takes, from its static shapes.

Counted exactly, a multiplication with its addition as 2:

    matrix product      [.., M, K] x [.., K, N]    2 * (.. * M * N) * K
    einsum              of two operands, summing   2 * the sizes of all its letters
    convolution         filter [k.., C / g, D]     2 * outputs * (k.. * C / g)
    depthwise           filter [k, k, C, D]        2 * outputs * (k * k)
    LSTM, GRU of cuDNN  P parameters, T steps      2 * P * T * batch

The gradient of a convolution with respect to its input, and that with respect to its
filter, take as many as the convolution. Where a filter reaches over the padding counts
as elsewhere.

What moves or describes data counts nothing, nor does arithmetic on integers. The rest
counts one for each element of the largest floating point tensor that it reads or
writes: an activation for each output, a reduction for each input. So an exponential is
one, and a decomposition or a sort counts too few; layers have little of those.

Calls are followed. A conditional counts as its most expensive branch. A loop counts as
its body times its trips if its condition compares a counter with a bound, both known
before the graph runs, as in `keras.layers.LSTM` over a static length and in its
gradient; otherwise as one trip. A further condition, which may end it early, is not
seen, nor are the trips of the inner loop in the gradient of a loop inside a loop. An
unknown size, most often that of the batch, counts as 1, and a tensor of unknown rank
as one element.

`traffic_bytes` goes the same way through a graph and adds up what all but the products
read and write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfgpipe.graph import reader
from tfgpipe.graph.reader import BRANCHES, LOOPS, FunctionGraph, Shape

# What an operation costs.
CostFunction: TypeAlias = Callable[[FunctionGraph, str], float]


def count(graph: tf.Graph, operations: Collection[str] | None = None) -> float:
    """Counts the floating point operations of one run of a graph.

    Args:
        graph: The graph, as it was traced. (One that was imported from a `GraphDef`
            may have lost shapes.)
        operations: Names of the operations to count. Defaults to all, those that no
            result depends on included, though TensorFlow will not run them. (Of a
            function that the graph calls, only what its results depend on counts.)
    """
    return _sum(graph, operations, _flops)


def traffic_bytes(graph: tf.Graph, operations: Collection[str] | None = None) -> float:
    """Returns the bytes that one run of a graph moves beside its products.

    Each operation reads its operands and writes its results, as where nothing is
    fused. Operations of `count`'s formulas are left out: what they read they reuse.

    Args:
        graph: As in `count`.
        operations: Names of the operations to count, or None for all.
    """
    return _sum(graph, operations, _traffic)


def each(
    graph: tf.Graph, operations: Collection[str]
) -> dict[str, tuple[float, float]]:
    """Returns the FLOPs of each of some operations, and the bytes that it moves.

    Args:
        graph: As in `count`.
        operations: Their names.
    """
    body = reader.read_graph(graph)
    return {
        name: (_cost(body, name, _flops), _cost(body, name, _traffic))
        for name in operations
    }


def _sum(
    graph: tf.Graph, operations: Collection[str] | None, price: CostFunction
) -> float:
    body = reader.read_graph(graph)
    names = body.nodes if operations is None else operations
    return float(sum(_cost(body, name, price) for name in names))


def _cost(body: FunctionGraph, name: str, price: CostFunction) -> float:
    """Returns the cost of an operation."""
    node = body.nodes[name]
    if node.op in LOOPS:
        loop = body.loop(name)
        return loop.num_trips() * _function_cost(loop.body, price)
    if calls := [_function_cost(call, price) for call in body.called_functions(name)]:
        return max(calls) if node.op in BRANCHES else sum(calls)
    return price(body, name)


def _traffic(body: FunctionGraph, name: str) -> float:
    """Returns the bytes that an operation reads and writes."""
    if body.nodes[name].op in _FORMULAS or body.nodes[name].op in _ZERO_TRAFFIC:
        return 0
    return sum(
        math.prod(t.shape) * t.dtype.size
        for t in (*body.input_tensors(name), *body.output_tensors(name))
        if t.floating
    )


def _flops(body: FunctionGraph, name: str) -> float:
    """Returns the floating point operations of an operation."""
    node = body.nodes[name]
    read, written = body.input_tensors(name), body.output_tensors(name)
    floating = [t.shape for t in (*read, *written) if t.floating]
    if node.op in _ZERO_FLOPS or not floating:
        return 0
    if node.op in _FORMULAS:
        shapes = [t.shape for t in read], [t.shape for t in written]
        return _FORMULAS[node.op](*shapes, node.attr)
    return _PER_ELEMENT.get(node.op, 1) * max(map(math.prod, floating))


def _function_cost(body: FunctionGraph, price: CostFunction) -> float:
    """Returns the cost of a call."""
    return sum(_cost(body, name, price) for name in body.executed_operations())


def _product(outputs: Shape, summed: Shape) -> int:
    return 2 * math.prod(outputs) * math.prod(summed)


def _matmul(i: Sequence[Shape], o: Sequence[Shape], attr: Mapping[str, Any]) -> int:
    transposed = attr["transpose_a"].b or attr["adj_x"].b
    return _product(o[0], i[0][-2:-1] if transposed else i[0][-1:])


def _einsum(i: Sequence[Shape], o: Sequence[Shape], attr: Mapping[str, Any]) -> int:
    operands, _, result = attr["equation"].s.decode().partition("->")
    sizes: dict[str, int] = {}
    for labels, shape in zip(operands.split(","), i, strict=True):
        # Dimensions under an ellipsis broadcast, so they are numbered from the right.
        before, _, after = labels.partition("...")
        under = len(shape) - len(before) - len(after)
        letters = (*before, *map(str, reversed(range(under))), *after)
        for letter, size in zip(letters, shape, strict=False):
            sizes[letter] = max(size, sizes.get(letter, 1))
    summed = any(letter.isalpha() and letter not in result for letter in sizes)
    return (summed + (len(i) == 2)) * math.prod(sizes.values())


# From the shapes of an operation's inputs `i` and outputs `o`, and its attributes.
# Input 2 of a convolution's gradients is the gradient of its output.
_FORMULAS: dict[str, Callable[[Any, Any, Any], int]] = {
    "MatMul": _matmul,
    "BatchMatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "Einsum": _einsum,
    "XlaEinsum": _einsum,
    "Conv2D": lambda i, o, _: _product(o[0], i[1][:-1]),
    "Conv2DBackpropInput": lambda i, o, _: _product(i[2], i[1][:-1]),
    "Conv2DBackpropFilter": lambda i, o, _: _product(i[2], o[0][:-1]),
    "Conv3D": lambda i, o, _: _product(o[0], i[1][:-1]),
    "Conv3DBackpropInputV2": lambda i, o, _: _product(i[2], i[1][:-1]),
    "Conv3DBackpropFilterV2": lambda i, o, _: _product(i[2], o[0][:-1]),
    "DepthwiseConv2dNative": lambda i, o, _: _product(o[0], i[1][:2]),
    "DepthwiseConv2dNativeBackpropInput": lambda i, o, _: _product(i[2], i[1][:2]),
    "DepthwiseConv2dNativeBackpropFilter": lambda i, o, _: _product(i[2], o[0][:2]),
    "CudnnRNNV3": lambda i, o, _: _product(i[0][:2], i[3]),
    "CudnnRNNBackpropV3": lambda i, o, _: 2 * _product(i[0][:2], i[3]),
}
# For each element of the largest tensor, where that is not one.
_PER_ELEMENT = {
    "FusedBatchNormV3": 8,
    "FusedBatchNormGradV3": 8,
    "LogSoftmax": 5,
    "Softmax": 5,
}
_MOVES_OR_DESCRIBES = """
    Assert AssignVariableOp BatchToSpaceND Bitcast BroadcastTo Cast CheckNumerics Concat
    ConcatV2 Const DepthToSpace Empty EnsureShape ExpandDims Fill Gather GatherNd
    GatherV2 Identity IdentityN MatrixBandPart MatrixDiagPartV3 MatrixDiagV3
    MatrixSetDiagV3 MirrorPad NoOp OnesLike Pack Pad PadV2 ParallelConcat Placeholder
    PlaceholderWithDefault PreventGradient PrintV2 Rank ReadVariableOp Reshape
    ResourceGather ReverseSequence ReverseV2 Roll Shape ShapeN Size Slice Snapshot
    SpaceToBatchND SpaceToDepth Split SplitV Squeeze StopGradient StridedSlice
    StridedSliceGrad StringFormat TensorListConcatV2 TensorListFromTensor
    TensorListGather TensorListGetItem TensorListPopBack TensorListPushBack
    TensorListPushBackBatch TensorListResize TensorListScatterV2 TensorListSetItem
    TensorListSplit TensorListStack Tile Transpose Unpack Where ZerosLike
"""
_ZERO_FLOPS = frozenset(_MOVES_OR_DESCRIBES.split())
_DESCRIBES_OR_RENAMES = """
    Assert Bitcast CheckNumerics Const Empty EnsureShape ExpandDims Identity IdentityN
    NoOp Placeholder PlaceholderWithDefault PreventGradient PrintV2 Rank ReadVariableOp
    Reshape Shape ShapeN Size Snapshot Squeeze StopGradient StringFormat
"""
_ZERO_TRAFFIC = frozenset(_DESCRIBES_OR_RENAMES.split())
