"""A call of a layer as a graph of its own, run on noise a few times by probes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import functions, keras_internals
from tfgpipe.capture import (
    Interpreter,
    Segment,
    TensorKey,
    TracingScope,
    layer_variables,
    stack_losses,
)
from tfgpipe.graph import eager_run
from tfgpipe.runtime import probe_inputs
from tfgpipe.stage import normalization

# Examples that a layer is probed on.
BATCH = 6
# In place of other unknown sizes: layers that work on a sequence in chunks need
# powers of two. If a layer takes no such size, those of its weights are tried.
UNKNOWN_SIZE = 8
# Weights of more entries are narrow: see `tfgpipe.graph.eager_run`.
_LARGE = 2**16


class TracedCall:
    """A call of a layer as a graph, without its gradient.

    Args:
        segment: The call.
        given: Its inputs.
        batch_size: The number of examples; None for any.
        unknown_size: In place of other sizes that are not known; None for any.
        training: True to run the layer as in training.

    Attributes:
        inputs: Its inputs, placeholders.
        values: The values of its variables, placeholders.
        outputs: Its outputs.
        losses: The losses that it adds.
        graph: The graph.
    """

    def __init__(
        self,
        segment: Segment,
        given: Sequence[keras.KerasTensor],
        batch_size: int | None,
        unknown_size: int | None,
        *,
        training: bool,
    ) -> None:
        keys = [TensorKey(number) for number in segment.input_ids]
        interpreter = Interpreter(segment, keys, training=training)
        self.variables = variables_of(segment)
        self._specs = [
            tf.TensorSpec(
                [batch_size, *(unknown_size if n is None else n for n in x.shape[1:])],
                x.dtype,
            )
            for x in given
        ]

        def build() -> None:
            self.inputs = list(map(_placeholder, self._specs))
            self.values = list(map(_placeholder, self.variables))
            values = zip(self.variables, self.values, strict=True)
            with TracingScope(values, None) as scope, _frozen_batch_norms(segment):
                made = interpreter.run(self.inputs)
            self.outputs = [x for x in made.values() if x is not None]
            self.losses = list(scope.losses)
            self._loss_values = stack_losses(scope.losses)
            self.graph = tf.compat.v1.get_default_graph()

        with tf.init_scope(), tf.device(None):
            functions.trace_graph(build)

    def examples(self) -> list[tf.Tensor]:
        """Returns examples, of which none has what its neighbours have."""
        return list(map(_probe_batch, self._specs))

    def __call__(
        self,
        inputs: Sequence[tf.Tensor],
        values: Sequence[tf.Tensor | eager_run.Narrow],
        draw: eager_run.Draw,
    ) -> tuple[list[np.ndarray], Any]:
        """Returns the outputs, and the losses that it adds, `[n]`."""
        losses = [] if self._loss_values is None else [self._loss_values]
        made = self.run([*self.outputs, *losses], inputs, values, draw)
        arrays = [x.numpy() for x in made]
        return arrays[: len(self.outputs)], (arrays[-1] if losses else np.zeros(0))

    def run(
        self,
        results: Sequence[tf.Tensor],
        inputs: Sequence[tf.Tensor],
        values: Sequence[tf.Tensor | eager_run.Narrow],
        draw: eager_run.Draw,
    ) -> list[tf.Tensor]:
        """Returns the values of tensors of its graph."""
        names = [x.name for x in (*self.inputs, *self.values)]
        arguments = dict(zip(names, (*inputs, *values), strict=True))
        return eager_run.run(results, arguments, draw)


def variables_of(segment: Segment) -> list[keras.Variable]:
    """Returns the variables of a segment, trainable ones first."""
    return [v for some in layer_variables(segment.layers) for v in some]


def _placeholder(spec: Any) -> tf.Tensor:
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)


def _frozen_batch_norms(segment: Segment) -> contextlib.AbstractContextManager[None]:
    """Has batch normalizations take their moving averages, for a while."""

    def frozen(norm: Any) -> type:
        return type(type(norm).__name__, (type(norm),), {"trainable": False})

    norms = normalization.batch_norms(segment.layers)
    return keras_internals.substitution.as_subclasses(norms, frozen)


def probe_value(variable: keras.Variable) -> tf.Tensor | eager_run.Narrow:
    """Returns a value of a variable: a random one, not its own, of a weight.

    Where weights start small or at zero, as those that choose experts do, their layer
    hardly depends on its inputs yet.
    """
    if not variable.trainable and keras_internals.variables.is_initialized(variable):
        return probe_inputs.example_variable_value(variable)
    shape = tuple(variable.shape)
    if (
        len(shape) < 2
        or math.prod(shape) < _LARGE
        or shape[-1] <= eager_run.NUM_COLUMNS
    ):
        return probe_inputs.example_value(variable)
    columns = probe_inputs.example_value(
        variable, shape=(*shape[:-1], eager_run.NUM_COLUMNS)
    )
    return eager_run.Narrow(columns, len(shape) - 1, shape[-1])


def _probe_batch(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns examples of which none has what its neighbours have."""
    shape = [BATCH, *spec.shape[1:]]
    noise = probe_inputs.example_tensor(
        tf.TensorSpec(shape, spec.dtype), unknown_size=UNKNOWN_SIZE
    )
    if spec.dtype.is_floating:
        return noise
    number = tf.reshape(tf.range(BATCH) % 2, [-1, *[1] * (len(shape) - 1)])
    numbers = tf.broadcast_to(number, shape)
    if spec.dtype == tf.string:
        return tf.strings.as_string(numbers)
    return tf.cast(numbers, spec.dtype)
