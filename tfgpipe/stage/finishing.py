"""Gradients of quantized weights, finished once their sum is there.

A weight that is quantized has the gradient of its quantized copy wherever that is not
clipped:

    dw = mask(w) * dq        mask(w) is 1 where w is in its range, else 0

The mask is the same for all microbatches of a step. So what each adds is dq, and the
sum is masked: once instead of M times, and dq is often a product that can be put off
(see `sums`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfgpipe.graph import matmul, partitioner
from tfgpipe.stage.joint import Gradient, Trace
from tfgpipe.stage.subgraph import Excerpt, GraphSource

_MASKS = (
    "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannelGradient",
)


def unfinished(trace: Trace, source: GraphSource, unchanged: Sequence[str]) -> Trace:
    """Returns a trace whose gradients are those to sum, masked ones before the mask.

    Args:
        trace: The stage.
        source: The same, as excerpts are copied from it.
        unchanged: Tensors that are the same for all microbatches.
    """
    gradients = [
        g and _unfinished(g, trace, source, unchanged) for g in trace.weight_grads
    ]
    return dataclasses.replace(trace, weight_grads=tuple(gradients))


def finish(trace: Trace, source: GraphSource, unchanged: Sequence[str]) -> Excerpt:
    """Returns the function from sums, and what does not change, to the gradients."""
    gradients = [g for g in trace.weight_grads if g is not None and g.finished]
    return source.excerpt(
        fetches=[g.finished for g in gradients if g.finished],
        feeds=[*(g.values for g in gradients), *unchanged],
    )


def _unfinished(
    gradient: Gradient, trace: Trace, source: GraphSource, unchanged: Sequence[str]
) -> Gradient:
    if gradient.indices is not None:
        return gradient
    op = trace.graph.get_tensor_by_name(gradient.values).op
    if op.type not in _MASKS:
        return gradient
    before, *others = op.inputs
    # With ranges that each microbatch moves the mask is not the same for all.
    needed = partitioner.program(
        source.graph, fetches=[x.name for x in others], feeds=unchanged
    ).operations
    if needed & {*source.placeholders, *source.stateful}:
        return gradient
    names = [trace.stand_ins.get(x.name, x.name) for x in matmul.factors(before) or ()]
    return Gradient(
        trace.stand_ins.get(before.name, before.name),
        factors=tuple(names),
        finished=gradient.values,
    )
