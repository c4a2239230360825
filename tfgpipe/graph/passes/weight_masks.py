"""Gradients of quantized weights, masked once their sum is there.

A weight that is quantized has the gradient of its quantized copy wherever that is not
clipped:

    dw = mask(w) * dq        mask(w) is 1 where w is in its range, else 0

The mask is the same for all microbatches of a step. So each microbatch adds dq, and the
sum is masked: once instead of M times, and dq is often a product that can be deferred
(see `gradient_factors`).
"""

from __future__ import annotations

import dataclasses

from tfgpipe.graph import partitioner
from tfgpipe.graph.joint_graph import GradientNames, JointGraph

_MASKS = (
    "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannelGradient",
)


def defer_masks(joint: JointGraph) -> JointGraph:
    """Returns a joint graph whose weight gradients are masked after their sum."""
    gradients = (g and _unmasked(g, joint) for g in joint.backward.weight_grads)
    backward = dataclasses.replace(joint.backward, weight_grads=tuple(gradients))
    return dataclasses.replace(joint, backward=backward)


def _unmasked(gradient: GradientNames, joint: JointGraph) -> GradientNames:
    if gradient.indices is not None:
        return gradient
    if joint.operation(gradient.values).type not in _MASKS:
        return gradient
    before, *others = joint.inputs_of(gradient.values)
    # With ranges that each microbatch moves the mask is not the same for all.
    needed = partitioner.subgraph(joint.edges, fetches=others, feeds=joint.invariant)
    if any(map(joint.is_source, needed.operations)):
        return gradient
    return GradientNames(before, finalized=gradient.values)
