"""A stage: consecutive Keras layers, and the programs that run them.

Programs are built on first use for each way of running (shapes of the inputs, training
or not, which weights are trainable, rematerialised or not) and kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Literal

import keras
import tensorflow as tf

from tfgpipe import program, seams
from tfgpipe.trace import Body, Trace, check_assignments, trace

Remat = Literal["stage", "layer", "except_last", "none"]
REMAT_MODES: tuple[Remat, ...] = ("stage", "layer", "except_last", "none")


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a stage is about to be run.

    Attributes:
        training: Whether layers run as in training.
        per_layer: Whether the backward recomputes layer by layer.
        may_be_empty: Whether microbatches without rows can occur.
        jit_compile: Whether XLA compiles the programs.
    """

    training: bool
    per_layer: bool
    may_be_empty: bool
    jit_compile: bool


class TracedStage:
    """A stage traced for one mode and one set of input shapes."""

    def __init__(
        self, stage_trace: Trace, mode: Mode, library: program.Library
    ) -> None:
        self.trace = stage_trace
        self._mode = mode
        self._library = library

    @functools.cached_property
    def recomputing(self) -> program.Programs:
        """Programs that keep only the stage's inputs for the backward."""
        return self._build(saves=False)

    @functools.cached_property
    def saving(self) -> program.Programs:
        """Programs that keep what spares the backward any recomputation."""
        return self._build(saves=True)

    @property
    def output_specs(self) -> tuple[tf.TensorSpec, ...]:
        """Shapes and types of what the stage hands to the next."""
        return tuple(map(self.trace.spec, self.trace.outputs))

    def _build(self, *, saves: bool) -> program.Programs:
        options = program.Options(
            saves=saves,
            may_be_empty=self._mode.may_be_empty,
            jit_compile=self._mode.jit_compile,
        )
        return program.Programs(self.trace, options, self._library)


class Stage:
    """Consecutive layers that run on one device.

    Attributes:
        index: k, counted from the pipeline's input.
        layers: The layers, in the order they are applied.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[keras.layers.Layer],
        library: program.Library,
    ) -> None:
        self.index = index
        self.layers = tuple(layers)
        self._library = library
        self._traced: dict[object, TracedStage] = {}

    @property
    def weights(self) -> list[keras.Variable]:
        """The trainable variables, each once."""
        return _unique(v for layer in self.layers for v in layer.trainable_variables)

    @property
    def state(self) -> list[keras.Variable]:
        """All other variables: statistics, seeds, frozen weights."""
        return _unique(
            v for layer in self.layers for v in layer.non_trainable_variables
        )

    def traced(self, input_specs: Sequence[tf.TensorSpec], mode: Mode) -> TracedStage:
        """Returns the stage traced for these inputs, from memory if it was before."""
        weights, state = self.weights, self.state
        # Freezing a layer can change what it does beside what is trained.
        frozen = [seams.is_trainable(layer) for layer in self.layers]
        key = (tuple(input_specs), mode, tuple(map(id, weights)), tuple(frozen))
        if key not in self._traced:
            stage_trace = trace(
                _body(self.layers, per_layer=mode.per_layer),
                input_specs=input_specs,
                weights=weights,
                state=state,
            )
            self._traced[key] = TracedStage(stage_trace, mode, self._library)
        return self._traced[key]


def _body(layers: Sequence[keras.layers.Layer], *, per_layer: bool) -> Body:
    """Returns the layers as a function of a tensor and, where it has one, its mask."""

    def body(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        x, *masks = inputs
        for mask in masks:
            seams.set_mask(x, mask)
        for layer in layers:
            x = _rematerialised(layer, x) if per_layer else layer(x)
        mask = seams.get_mask(x)
        return [x] if mask is None else [x, mask]

    return body


def _rematerialised(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Applies a layer so that its gradient recomputes it from its input alone.

    `tf.recompute_grad` differentiates only with respect to arguments, so the weights
    are passed as such. It runs `call` twice; what the layer assigns, adds as a loss or
    masks is taken from the first run, which is the forward pass.
    """
    scope = seams.current_stateless_scope()
    weights, state = layer.trainable_variables, layer.non_trainable_variables
    held = [(variable, scope.get_current_value(variable)) for variable in state]
    mask = seams.get_mask(x)
    first: list[tuple[list[tf.Tensor], tf.Tensor | None]] = []

    def call(x: tf.Tensor, *values: tf.Tensor) -> list[tf.Tensor]:
        if mask is not None:
            seams.set_mask(x, mask)
        inner = keras.StatelessScope(
            [*zip(weights, values, strict=True), *held], collect_losses=True
        )
        with inner:
            y = layer(x)
        check_assignments(inner, [*weights, *state])
        first.append(([inner.get_current_value(v) for v in state], seams.get_mask(y)))
        return [y, *inner.losses]

    y, *losses = tf.recompute_grad(call)(
        x, *(scope.get_current_value(v) for v in weights)
    )
    new_state, new_mask = first[0]
    for variable, value in zip(state, new_state, strict=True):
        scope.add_update((variable, value))
    for loss in losses:
        scope.add_loss(loss)
    if new_mask is not None:
        seams.set_mask(y, new_mask)
    return y


def _unique(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())
