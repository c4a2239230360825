"""Masks on the outputs of a model, for a whole mini-batch, before it is run.

The denominators of losses depend on them, and are needed before the first backward,
which may come before the last forward. All layers are traced once more, but of all that
they do only what masks depend on runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import tensorflow as tf

from tfgpipe._util import unique
from tfgpipe.capture import Interpreter, Segment, TensorKey, layer_variables
from tfgpipe.runtime.pipeline import Pipeline
from tfgpipe.stage import GraphSource, platform_of, trace_joint


class OutputMasks:
    """The masks on the outputs of a model, as a function of its inputs.

    Args:
        pipeline: The model.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._functions: dict[Hashable, Callable[..., dict[int, tf.Tensor]]] = {}

    def __call__(
        self, inputs: Mapping[TensorKey, tf.Tensor], *, training: bool
    ) -> dict[int, tf.Tensor]:
        """Returns by id of each output that has a mask, the mask `[B, ...]`.

        Args:
            inputs: What goes into the model, `[B, ...]` each.
            training: Whether layers run as in training.
        """
        specs = {w: tf.TensorSpec(x.shape, x.dtype) for w, x in inputs.items()}
        key = (training, *specs.items())
        if key not in self._functions:
            with tf.init_scope():
                self._functions[key] = self._function(specs, training=training)
        with tf.device(self._pipeline.placement.devices[-1]):
            return self._functions[key](*inputs.values())

    def _function(
        self, specs: Mapping[TensorKey, tf.TensorSpec], *, training: bool
    ) -> Callable[..., dict[int, tf.Tensor]]:
        network = self._pipeline.captured.graph
        part = Segment(network.calls, network.input_ids, network.output_ids)
        layers = [layer for stage in self._pipeline.stages for layer in stage.layers]
        trainable, others = layer_variables(layers)
        variables = unique([*trainable, *others])
        trace = trace_joint(
            Interpreter(part, list(specs), training=training, remat=False).run,
            input_specs=list(specs.values()),
            weights=[],
            state=variables,
            non_differentiable=range(len(specs)),
        )
        names = dict(zip(trace.forward.keys, trace.forward.outputs, strict=True))
        masks = {
            tensor.value_id: name for tensor, name in names.items() if tensor.is_mask
        }
        given = trace.given
        subgraph = GraphSource(trace, on_one_device=True).extract(
            fetches=list(masks.values()), feeds=(*given.inputs, *given.state)
        )
        last = self._pipeline.placement.devices[-1]
        core = last if platform_of(last) == "tpu" else None

        @tf.function(autograph=False)
        def function(*tensors: tf.Tensor) -> dict[int, tf.Tensor]:
            values = dict(zip(given.inputs, tensors, strict=True))
            for variable, name in zip(variables, given.state, strict=True):
                if name in subgraph.feeds:
                    values[name] = tf.convert_to_tensor(variable.value)
            with tf.device(core):  # For XLA, which asks where each operation is.
                made = subgraph.run(*(values[feed] for feed in subgraph.feeds))
            found = dict(zip(subgraph.fetches, made, strict=True))
            return {number: found[name] for number, name in masks.items()}

        return function
