"""Peak memory of a traced function, from the sizes and order of its tensors."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfgpipe._util import num_bytes

_ARGUMENTS = ("Placeholder", "Const")
_IN_ITS_INPUT = """
    ExpandDims Identity InplaceAdd InplaceUpdate PreventGradient Reshape Squeeze
    StopGradient
"""
# Operations whose result is in the buffer of their first input.
_ALIASING_OPS = frozenset(_IN_ITS_INPUT.split())
_ON_SINGLE_ELEMENTS = """
    Add AddN AddV2 BiasAdd Elu EluGrad Erf Erfc Exp LeakyRelu LeakyReluGrad Log Maximum
    Minimum Mul Neg Pow RealDiv Relu ReluGrad Rsqrt RsqrtGrad Sigmoid SigmoidGrad
    Softmax Softplus Sqrt SqrtGrad Square SquaredDifference Sub Tanh TanhGrad
"""
# Operations that write over an input that nothing else reads.
_ELEMENTWISE = frozenset(_ON_SINGLE_ELEMENTS.split())


def distinct_buffers(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors in whose buffers some tensors are, each once.

    A copy on another device is in one of its own.
    """
    found = {}
    for tensor in tensors:
        while tensor.op.type in _ALIASING_OPS:
            if tensor.op.device != tensor.op.inputs[0].op.device:
                break
            tensor = tensor.op.inputs[0]
        found[tensor.ref()] = tensor
    return list(found.values())


def peak_bytes(graph: tf.Graph) -> int:
    """Returns the peak of the bytes that a function holds beside its arguments.

    Operations run in the order of the graph, but those that allocate nothing as soon as
    their inputs are there, as gradients are added to their sums. Each allocates its
    results, then inputs that nothing else uses are freed. An elementwise operation
    writes into an input that it is the last to use.
    """
    operations = _in_order(graph)
    readers = collections.Counter(x.ref() for op in operations for x in op.inputs)
    readers.update(x.ref() for x in graph.outputs)
    # For each tensor the one whose buffer it is in, and for that its size.
    buffer: dict[Any, Any] = {}
    size: dict[Any, int] = {}
    current = peak = 0
    for op in operations:
        inputs = [buffer[x.ref()] for x in op.inputs]
        for x in op.outputs:
            if op.type in _ALIASING_OPS:
                buffer[x.ref()] = inputs[0]
                readers[inputs[0]] += readers[x.ref()]
            else:
                buffer[x.ref()] = x.ref()
                size[x.ref()] = 0 if op.type in _ARGUMENTS else num_bytes(x)
        new = 0 if op.type in _ALIASING_OPS else sum(size[x.ref()] for x in op.outputs)
        readers.subtract(inputs)
        freed = [size.pop(x) for x in dict.fromkeys(inputs) if not readers[x]]
        in_place = op.type in _ELEMENTWISE and new in freed
        peak = max(peak, current if in_place else current + new)
        unused = [x.ref() for x in op.outputs if not readers[buffer[x.ref()]]]
        current += new - sum(freed) - sum(size.pop(x, 0) for x in unused)
    return peak


def _in_order(graph: tf.Graph) -> list[tf.Operation]:
    """Returns arguments, then the others as they are, but aliasing ones early."""
    operations = graph.get_operations()
    followers = collections.defaultdict(list)
    for op in operations:
        if op.type in _ALIASING_OPS:
            for before in _parents(op):
                followers[before].append(op)
    done = {op: None for op in operations if op.type in _ARGUMENTS}
    for op in operations:
        ready = [op]
        while ready:
            done.setdefault(current := ready.pop())
            ready += [
                each
                for each in followers[current]
                if each not in done and all(x in done for x in _parents(each))
            ]
    return list(done)


def _parents(op: tf.Operation) -> list[tf.Operation]:
    return [*(x.op for x in op.inputs), *op.control_inputs]
