"""Gradients of quantized weights, masked once their sum is there.

A weight that is quantized has the gradient of its quantized copy wherever that is not
clipped:

    dw = mask(w) * dq        mask(w) is 1 where w is in its range, else 0

The mask is the same for all microbatches of a step. So each microbatch adds dq, and
sum is masked: once instead of M times, and dq is often a product that can be deferred
(see `accumulation`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfgpipe.graph import matmul, partitioner
from tfgpipe.stage.joint import GradientNames, JointGraph
from tfgpipe.stage.subgraph import GraphSource, SubgraphFunction

_MASKS = (
    "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannelGradient",
)


def unmasked(trace: JointGraph, source: GraphSource) -> JointGraph:
    """Returns a trace whose weight gradients are those to sum, before their masks.

    Args:
        trace: The stage.
        source: The same, as subgraphs are copied from it.
    """
    gradients = [g and _unmasked(g, trace, source) for g in trace.backward.weight_grads]
    backward = dataclasses.replace(trace.backward, weight_grads=tuple(gradients))
    return dataclasses.replace(trace, backward=backward)


def masked(
    trace: JointGraph, source: GraphSource, invariant: Sequence[str]
) -> SubgraphFunction:
    """Returns the function from sums, and what is invariant, to the gradients."""
    weight_grads = trace.backward.weight_grads
    gradients = [g for g in weight_grads if g is not None and g.finalized]
    return source.extract(
        fetches=[g.finalized for g in gradients if g.finalized],
        feeds=[*(g.values for g in gradients), *invariant],
    )


def _unmasked(
    gradient: GradientNames, trace: JointGraph, source: GraphSource
) -> GradientNames:
    if gradient.indices is not None:
        return gradient
    originals = {new: old for old, new in trace.replacements.items()}
    values = originals.get(gradient.values, gradient.values)
    op = trace.graph.get_tensor_by_name(values).op
    if op.type not in _MASKS:
        return gradient
    before, *others = op.inputs
    # With ranges that each microbatch moves the mask is not the same for all.
    needed = partitioner.subgraph(
        source.graph, fetches=[x.name for x in others], feeds=trace.invariant
    ).operations
    if needed & {*source.placeholders, *source.stateful}:
        return gradient
    replaced = trace.replacements
    names = [
        replaced.get(x.name, x.name)
        for x in matmul.weight_gradient_factors(before) or ()
    ]
    return GradientNames(
        replaced.get(before.name, before.name),
        factors=tuple(names),
        finalized=gradient.values,
    )
