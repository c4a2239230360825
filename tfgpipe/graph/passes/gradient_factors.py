"""Weight gradients that are a matrix product, `x^T @ dy`, with their factors.

The sum of such products over microbatches is the product of all their rows, so it may
be deferred to the end of a step: see `stage.accumulation`.
"""

from __future__ import annotations

import dataclasses

from tfgpipe.graph.joint_graph import GradientNames, JointGraph


def with_factors(joint: JointGraph) -> JointGraph:
    """Returns a joint graph that names the factors of weight gradients."""

    def named(gradient: GradientNames | None) -> GradientNames | None:
        if gradient is None or gradient.indices is not None:
            return gradient
        factors = weight_gradient_factors(joint, gradient.values)
        return dataclasses.replace(gradient, factors=factors)

    gradients = tuple(map(named, joint.backward.weight_grads))
    backward = dataclasses.replace(joint.backward, weight_grads=gradients)
    return dataclasses.replace(joint, backward=backward)


def weight_gradient_factors(joint: JointGraph, gradient: str) -> tuple[str, ...]:
    """Returns x and dy of a gradient that is `x^T @ dy`, or nothing if it is not."""
    op = joint.operation(gradient)
    while op.type in ("Identity", "Reshape"):
        gradient = joint.inputs_of(gradient)[0]
        op = joint.operation(gradient)
    if op.type != "MatMul" or not op.get_attr("transpose_a"):
        return ()
    return () if op.get_attr("transpose_b") else joint.inputs_of(gradient)
