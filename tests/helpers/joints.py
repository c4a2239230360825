"""Joint graphs by themselves: their results for given arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfgpipe.graph.joint_graph import JointGraph
from tfgpipe.stage.subgraph import GraphSource


def run(
    joint: JointGraph, *arrays: np.ndarray, compiled: bool = False
) -> Sequence[tf.Tensor]:
    """Returns outputs, then gradients of inputs and weights that there are.

    Args:
        joint: The joint graph.
        *arrays: Inputs, weights and state, then gradients of outputs.
        compiled: True to compile it by XLA.
    """
    feeds = [*joint.given.inputs, *joint.given.variables, *joint.backward.given]
    gradients = [g.finalized or g.values for g in joint.backward.weight_grads if g]
    fetches = [
        *joint.forward.outputs,
        *(name for name in joint.backward.input_grads if name),
        *gradients,
    ]
    function = GraphSource(joint).extract(fetches=fetches, feeds=feeds)
    values = dict(zip(feeds, map(tf.constant, arrays), strict=True))
    made = tf.function(function.run, autograph=False, jit_compile=compiled or None)(
        *(values[name] for name in function.feeds)
    )
    results = dict(zip(function.fetches, made, strict=True))
    return [results[name] for name in fetches]
