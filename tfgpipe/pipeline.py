"""A mini-batch through all stages: the actions of a schedule as TensorFlow operations.

The whole pipeline is one custom gradient. Its forward emits the schedule's forward
actions, its gradient the backward actions, so both passes run in an order that this
library chooses rather than one that automatic differentiation happens to produce.

    device 0   F0 ─▶ F1 ─▶ F2 ─▶ F3 ············ B3 ─▶ B2 ─▶ B1 ─▶ B0
                 ╲     ╲     ╲     ╲            ╱     ╱     ╱     ╱
    device 1      F0 ─▶ F1 ─▶ F2 ─▶ F3 ─▶ B3 ─▶ B2 ─▶ B1 ─▶ B0

Along a row, control dependencies: TensorFlow runs whatever is ready, so without them a
device would start all microbatches at once and hold the activations of all of them.
Between rows, nothing but data: a result is sent as soon as it is there, while its
device goes on with the next microbatch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import microbatch, program, schedule
from tfgpipe.stage import Mode, Remat, Stage, TracedStage
from tfgpipe.trace import total


@dataclasses.dataclass(frozen=True)
class Result:
    """What a mini-batch leaves behind.

    Attributes:
        outputs: Outputs of the last stage, joined to `[B, ...]`.
        loss: The losses added by layers, averaged over the rows, or None.
        new_state: For each changed variable, its value after the last microbatch.
    """

    outputs: list[tf.Tensor]
    loss: tf.Tensor | None
    new_state: list[tuple[keras.Variable, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages on devices, and how a mini-batch goes through them.

    Attributes:
        stages: The K stages.
        devices: For each stage, the device of the replica being built.
        num_microbatches: M.
        remat: What the backward recomputes.
        jit_compile: For each stage, whether XLA compiles its programs.
    """

    stages: Sequence[Stage]
    devices: Sequence[str]
    num_microbatches: int
    remat: Remat
    jit_compile: Sequence[bool]

    def run(self, inputs: Sequence[tf.Tensor], *, training: bool) -> Result:
        """Runs a mini-batch through all stages, differentiably.

        Args:
            inputs: Inputs of the first stage, `[B, ...]` each.
            training: Whether layers run as in training.
        """
        split = microbatch.split_rows(inputs[0], self.num_microbatches)
        traced = self._trace(inputs, split, training=training)
        weights, state = self._snapshot()
        step = _Step(self, traced, split, weights, state, saves=self._saves(training))
        changed: list[tuple[keras.Variable, tf.Tensor]] = []

        @tf.custom_gradient
        def differentiable(*tensors: tf.Tensor) -> Any:
            outputs, loss = step.forward(tensors[: len(inputs)])
            # Not differentiated, so they need not be results of this function.
            changed.extend(step.changed_state())

            # TensorFlow passes `variables` if it finds one behind the results, such as
            # a frozen weight, and then wants a gradient for it.
            def gradient(*output_grads: tf.Tensor, variables: Any = None) -> Any:
                grads = step.backward(
                    output_grads[: len(outputs)],
                    None if loss is None else output_grads[-1],
                )
                return grads if variables is None else (grads, [None] * len(variables))

            return [*outputs, *([] if loss is None else [loss])], gradient

        flat = [value for values in weights for value in values]
        with tf.device(self.devices[-1]):
            results = differentiable(*inputs, *flat)
        num_outputs = len(traced[-1].trace.outputs)
        loss = results[num_outputs] if len(results) > num_outputs else None
        return Result(results[:num_outputs], loss, changed)

    def _trace(
        self, inputs: Sequence[tf.Tensor], split: microbatch.Split, *, training: bool
    ) -> list[TracedStage]:
        size = split.static_size
        specs = tuple(tf.TensorSpec([size, *x.shape[1:]], x.dtype) for x in inputs)
        traced = []
        for stage, jit_compile in zip(self.stages, self.jit_compile, strict=True):
            mode = Mode(
                training=training,
                per_layer=self.remat == "layer",
                may_be_empty=split.may_be_empty,
                jit_compile=jit_compile,
            )
            traced.append(stage.traced(specs, mode))
            specs = traced[-1].output_specs
        return traced

    def _snapshot(self) -> tuple[list[list[tf.Tensor]], list[list[tf.Tensor]]]:
        """Reads every variable, on its stage's device, as it is before the step."""
        weights, state = [], []
        for stage, device in zip(self.stages, self.devices, strict=True):
            with tf.device(device):
                weights.append([tf.identity(v.value) for v in stage.weights])
                state.append([tf.identity(v.value) for v in stage.state])
        return weights, state

    def _saves(self, training: bool) -> Sequence[bool]:
        """Returns for each microbatch whether its activations are kept."""
        last = self.num_microbatches - 1
        if not training or self.remat in ("stage", "layer"):
            return [False] * self.num_microbatches
        if self.remat == "none":
            return [True] * self.num_microbatches
        return [m == last for m in range(self.num_microbatches)]


class _Step:
    """The actions of one mini-batch, being emitted."""

    def __init__(
        self,
        pipeline: Pipeline,
        traced: Sequence[TracedStage],
        split: microbatch.Split,
        weights: Sequence[Sequence[tf.Tensor]],
        state: Sequence[Sequence[tf.Tensor]],
        saves: Sequence[bool],
    ) -> None:
        self._pipeline = pipeline
        self._traced = traced
        self._split = split
        self._schedule = schedule.gpipe(len(traced), len(split.sizes))
        self._saves = saves[-len(split.sizes) :]
        self._values = [
            dict(zip((*t.trace.weights, *t.trace.state), (*w, *s), strict=True))
            for t, w, s in zip(traced, weights, state, strict=True)
        ]
        # For each action of stage k on microbatch m, what its programs need by name.
        self._kept: dict[tuple[int, int], program.Values] = {}

    def forward(
        self, inputs: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Emits the forward actions; returns outputs `[B, ...]` and the loss."""
        devices, traced = self._pipeline.devices, self._traced
        with tf.device(devices[0]):
            boundary = self._cut(inputs)
        losses = []
        chain = _Chain(len(devices))
        for action in self._schedule.actions("forward"):
            k, m = action.stage, action.microbatch
            trace = traced[k].trace
            received = zip(trace.inputs, boundary[m], strict=True)
            values = {**self._values[k], **dict(received)}
            forward = self._programs(k, m).forward
            with tf.device(devices[k]), chain.after(k):
                made = forward(values, *self._rows(m))
            chain.ran(k, made.values())
            self._kept[k, m] = {**values, **made}
            everything = self._kept[k, m]
            boundary[m] = [everything[output] for output in trace.outputs]
            for before, after in zip(trace.state, trace.new_state, strict=True):
                self._values[k][before] = everything[after]
            if trace.loss is not None:
                with tf.device(devices[k]):
                    loss = everything[trace.loss]
                    losses.append(loss * self._split.weight(m, loss.dtype))
        with tf.device(devices[-1]):
            self._outputs = [microbatch.join(c) for c in zip(*boundary, strict=True)]
            return self._outputs, total(losses)

    def changed_state(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the variables that the forward actions changed, with new values."""
        return [
            (variable, values[before])
            for stage, traced, values in zip(
                self._pipeline.stages, self._traced, self._values, strict=True
            )
            for variable, before, after in zip(
                stage.state, traced.trace.state, traced.trace.new_state, strict=True
            )
            if before != after
        ]

    def backward(
        self, output_grads: Sequence[tf.Tensor], loss_grad: tf.Tensor | None
    ) -> list[tf.Tensor | None]:
        """Emits the backward actions; returns gradients of inputs, then of weights."""
        devices, traced = self._pipeline.devices, self._traced
        with tf.device(devices[-1]):
            boundary = self._cut(
                [
                    None if name is None else _dense(grad, output)
                    for name, grad, output in zip(
                        traced[-1].trace.output_grads,
                        output_grads,
                        self._outputs,
                        strict=True,
                    )
                ]
            )
        accumulators = []
        for stage, device in zip(traced, devices, strict=True):
            with tf.device(device):
                accumulators.append(program.empty_accumulators(stage.trace))
        chain = _Chain(len(devices))
        for action in self._schedule.actions("backward"):
            k, m = action.stage, action.microbatch
            trace = traced[k].trace
            values = dict(self._kept[k, m])
            values.update(_paired(trace.output_grads, boundary[m]))
            if trace.loss_grad is not None:
                with tf.device(devices[k]):
                    dtype = trace.spec(trace.loss_grad).dtype
                    share = self._split.weight(m, dtype)
                    values[trace.loss_grad] = tf.cast(loss_grad, dtype) * share
            backward = self._programs(k, m).backward
            with tf.device(devices[k]), chain.after(k):
                grads, accumulators[k] = backward(
                    values, accumulators[k], *self._rows(m)
                )
            chain.ran(k, [*grads, *accumulators[k]])
            made = iter(grads)
            boundary[m] = [None if g is None else next(made) for g in trace.input_grads]
        with tf.device(devices[0]):
            input_grads = [
                None if column[0] is None else microbatch.join(column)
                for column in zip(*boundary, strict=True)
            ]
        weight_grads: list[tf.Tensor | None] = []
        for stage, sums in zip(traced, accumulators, strict=True):
            made = iter(sums)
            weight_grads.extend(
                None if g is None else next(made) for g in stage.trace.weight_grads
            )
        return [*input_grads, *weight_grads]

    def _programs(self, k: int, m: int) -> program.Programs:
        stage = self._traced[k]
        return stage.saving if self._saves[m] else stage.recomputing

    def _rows(self, m: int) -> list[tf.Tensor]:
        """Returns the size of a microbatch that may turn out empty, else nothing."""
        return [self._split.sizes[m]] if self._split.may_be_empty else []

    def _cut(self, tensors: Sequence[tf.Tensor | None]) -> list[list[tf.Tensor | None]]:
        """Cuts mini-batch tensors into a list of tensors for each microbatch."""
        absent = [None] * len(self._split.sizes)
        columns = [absent if t is None else self._split.cut(t) for t in tensors]
        return [list(row) for row in zip(*columns, strict=True)]


class _Chain:
    """Orders the actions of each device one after another."""

    def __init__(self, num_devices: int) -> None:
        self._last: list[list[tf.Operation]] = [[] for _ in range(num_devices)]

    def after(self, k: int) -> contextlib.AbstractContextManager[Any]:
        """Operations created inside run after the last action on device `k`."""
        return tf.control_dependencies(self._last[k])

    def ran(self, k: int, results: Iterable[tf.Tensor]) -> None:
        """Notes the results of the newest action on device `k`."""
        if not tf.executing_eagerly():
            self._last[k] = [result.op for result in itertools.islice(results, 1)]


def _dense(gradient: tf.Tensor | None, output: tf.Tensor) -> tf.Tensor:
    """Returns a gradient as a tensor; zero where the output was not used."""
    return tf.zeros_like(output) if gradient is None else tf.convert_to_tensor(gradient)


def _paired(
    names: Sequence[str | None], tensors: Sequence[tf.Tensor]
) -> program.Values:
    return {
        name: tensor
        for name, tensor in zip(names, tensors, strict=True)
        if name is not None
    }
