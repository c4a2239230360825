"""Masks on the outputs of a model, for a whole mini-batch, before it is run.

The denominators of losses depend on them, and are needed before the first backward,
which may come before the last forward. All layers are traced once more, but of all that
they do only what masks depend on runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping

import keras
import tensorflow as tf

from tfgpipe._util import unique
from tfgpipe.capture import CallGraph, Interpreter, Segment, TensorKey, layer_variables
from tfgpipe.graph import joint_graph
from tfgpipe.stage import normalization
from tfgpipe.stage.joint import trace_joint, trace_with_captured
from tfgpipe.stage.options import platform_of
from tfgpipe.stage.subgraph import GraphSource


class OutputMasks:
    """The masks on the outputs of a model, as a function of its inputs.

    Args:
        graph: The model.
        device: The device to compute them on.
    """

    def __init__(self, graph: CallGraph, device: str) -> None:
        self._segment = Segment(graph.calls, graph.input_ids, graph.output_ids)
        self._device = device
        self._functions: dict[Hashable, Callable[..., dict[int, tf.Tensor]]] = {}

    def __call__(
        self, inputs: Mapping[TensorKey, tf.Tensor], *, training: bool
    ) -> dict[int, tf.Tensor]:
        """Returns by id of each output that has a mask, the mask `[B, ...]`.

        Args:
            inputs: The inputs of the model, `[B, ...]` each.
            training: True to run layers as in training.
        """
        specs = {w: tf.TensorSpec(x.shape, x.dtype) for w, x in inputs.items()}
        key = (training, *specs.items())
        if key not in self._functions:
            with tf.init_scope():
                self._functions[key] = self._function(specs, training=training)
        with tf.device(self._device):
            return self._functions[key](*inputs.values())

    def _function(
        self, specs: Mapping[TensorKey, tf.TensorSpec], *, training: bool
    ) -> Callable[..., dict[int, tf.Tensor]]:
        layers = self._segment.layers
        captured: list[keras.Variable] = []

        def variables() -> list[keras.Variable]:
            return unique(itertools.chain(*layer_variables(layers, captured)))

        def trace_masks() -> joint_graph.JointGraph:
            interpreter = Interpreter(
                self._segment,
                list(specs),
                training=training,
                captured=captured,
            )
            return trace_joint(
                interpreter.run,
                input_specs=list(specs.values()),
                weights=[],
                state=variables(),
                non_differentiable=range(len(specs)),
            )

        with normalization.deferred_batch_norms(layers, "microbatch"):
            trace = trace_with_captured(trace_masks, captured)
        read = variables()  # As they are now: what is trainable may change.
        names = zip(trace.forward.keys, trace.forward.outputs, strict=True)
        masks = {key.value_id: name for key, name in names if key.is_mask}
        given = trace.given
        subgraph = GraphSource(trace, on_one_device=True).extract(
            fetches=list(masks.values()), feeds=(*given.inputs, *given.state)
        )
        if platform_of(self._device) == "tpu":
            subgraph = subgraph.compiled()

        @tf.function(autograph=False)
        def function(*tensors: tf.Tensor) -> dict[int, tf.Tensor]:
            values = dict(zip(given.inputs, tensors, strict=True))
            for variable, name in zip(read, given.state, strict=True):
                if name in subgraph.feeds:
                    values[name] = tf.convert_to_tensor(variable.value)
            found = subgraph.by_name(values)
            return {value_id: found[name] for value_id, name in masks.items()}

        return function
