"""The actions of a mini-batch as TensorFlow operations, in the order of a schedule.

    device 0   F0 ─▶ F1 ─▶ F2 ─▶ F3 ············ B3 ─▶ B2 ─▶ B1 ─▶ B0
                 ╲     ╲     ╲     ╲            ╱     ╱     ╱     ╱
    device 1      F0 ─▶ F1 ─▶ F2 ─▶ F3 ─▶ B3 ─▶ B2 ─▶ B1 ─▶ B0

Along a row, control dependencies: TensorFlow runs whatever is ready, so without them a
device would start all microbatches at once and hold the activations of all of them.
Between rows, nothing but data: a result is sent as soon as it is there, to each device
that reads it, while its own goes on with the next microbatch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import microbatch, program, schedule
from tfgpipe.replay import Wire
from tfgpipe.snapshot import Snapshot
from tfgpipe.stage import Stage, TracedStage
from tfgpipe.trace import differentiable, total

Tensors = dict[Wire, tf.Tensor]


class Step:
    """The actions of one mini-batch, being emitted.

    Args:
        stages: The K stages.
        traced: The same, traced.
        devices: For each stage, its device.
        wanted: Numbers of the values to return.
        split: How the mini-batch is cut.
        before: The variables as they are before the step.
        saves: For each microbatch whether its activations are kept.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        traced: Sequence[TracedStage],
        *,
        devices: Sequence[str],
        wanted: Sequence[int],
        split: microbatch.Split,
        before: Snapshot,
        saves: Sequence[bool],
    ) -> None:
        self._stages = stages
        self._traced = traced
        self._devices = devices
        self._wanted = wanted
        self._split = split
        self._before = before
        self._schedule = schedule.gpipe(len(traced), len(split.sizes))
        self._saves = saves[-len(split.sizes) :]
        # For each stage, its variables by the name they have in its trace, and what
        # it gathers.
        self._variables = [
            dict(
                zip(
                    (*t.trace.weights, *t.trace.state),
                    [before.values[id(v)] for v in (*stage.weights, *stage.state)],
                    strict=True,
                )
            )
            for t, stage in zip(traced, stages, strict=True)
        ]
        # For each stage, what orders its sums over replicas.
        self._tokens: list[tf.Tensor | None] = []
        for k, device in enumerate(self._devices):
            with tf.device(device):
                gathered = program.nothing_gathered(traced[k].trace)
                token = _token() if traced[k].trace.num_meetings else None
            self._variables[k].update(gathered)
            self._tokens.append(token)
        # For each action of stage k on microbatch m, what its programs need by name.
        self._kept: dict[tuple[int, int], program.Values] = {}
        self._inputs: tuple[Wire, ...] = ()
        self._outputs: Tensors = {}

    def forward(self, inputs: Tensors) -> tuple[Tensors, tf.Tensor | None]:
        """Emits the forward actions; returns what is wanted `[B, ...]` and the loss."""
        self._inputs = tuple(inputs)
        pieces = self._cut(inputs, self._first_readers())
        losses = []
        chain = _Chain(len(self._devices))
        for action in self._schedule.actions("forward"):
            k, m = action.stage, action.microbatch
            stage, trace = self._traced[k], self._traced[k].trace
            values = {**self._variables[k], **self._meeting(k, m)}
            for wire, name in zip(stage.reads, trace.inputs, strict=True):
                values[name] = pieces[m][wire]
            forward = self._programs(k, m).forward
            with tf.device(self._devices[k]), chain.after(k):
                made = forward(values, *self._rows(m))
            chain.ran(k, made.values())
            values.update(made)
            self._kept[k, m] = values
            for wire, name in zip(stage.makes, trace.outputs, strict=True):
                pieces[m][wire] = values[name]
            for before, after in zip(trace.carried, trace.new_carried, strict=True):
                self._variables[k][before] = values[after]
            if trace.loss is not None:
                with tf.device(self._devices[k]):
                    loss = values[trace.loss]
                    losses.append(loss * self._split.weight(m, loss.dtype))
        # A mask that a later stage took off its tensor is off the output as well.
        gone = {Wire(n, is_mask=True) for t in self._traced for n in t.unmasked}
        for wire, k in self._makers().items():
            if wire.number in self._wanted and wire not in gone:
                with tf.device(self._devices[k]):
                    self._outputs[wire] = microbatch.join([row[wire] for row in pieces])
        with tf.device(self._devices[-1]):
            return self._outputs, total(losses)

    def changed_state(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the variables that the forward actions changed, with new values."""
        changed = [
            (variable, values[before])
            for stage, traced, values in zip(
                self._stages, self._traced, self._variables, strict=True
            )
            for variable, before, after in zip(
                stage.state, traced.trace.state, traced.trace.new_state, strict=True
            )
            if before != after
        ]
        return [*changed, *self._updated()]

    def _updated(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the variables that move by what was gathered, with new values."""
        moved: dict[int, keras.Variable] = {}
        latest = dict(self._before.values)
        for traced, values in zip(self._traced, self._variables, strict=True):
            trace = traced.trace
            for statistic, names in zip(trace.statistics, trace.gathered, strict=True):
                keys = [id(variable) for variable in statistic.variables]
                owner = self._before.owners[keys[0]]
                with tf.device(self._devices[owner]):
                    after = statistic.update(
                        [values[name] for name in names], [latest[key] for key in keys]
                    )
                # Several calls may move a variable, one after the other.
                latest.update(zip(keys, after, strict=True))
                moved.update(zip(keys, statistic.variables, strict=True))
        return [(variable, latest[key]) for key, variable in moved.items()]

    def backward(
        self, output_grads: Sequence[tf.Tensor], loss_grad: tf.Tensor | None
    ) -> list[tf.Tensor | None]:
        """Emits the backward actions; returns gradients of inputs, then of weights."""
        wanted = {
            wire: tf.convert_to_tensor(gradient)
            for (wire, y), gradient in zip(
                self._outputs.items(), output_grads, strict=True
            )
            if differentiable(y) and gradient is not None
        }
        # Gradients of each value so far: one from each stage that reads it.
        grads: list[dict[Wire, list[tf.Tensor]]] = [
            {wire: [piece] for wire, piece in row.items()}
            for row in self._cut(wanted, self._makers())
        ]
        accumulators = []
        for stage, device in zip(self._traced, self._devices, strict=True):
            with tf.device(device):
                accumulators.append(program.empty_accumulators(stage.trace))
        chain = _Chain(len(self._devices))
        for action in self._schedule.actions("backward"):
            k, m = action.stage, action.microbatch
            stage, trace = self._traced[k], self._traced[k].trace
            values = dict(self._kept[k, m])
            with tf.device(self._devices[k]):
                for wire, output, name in zip(
                    stage.makes, trace.outputs, trace.output_grads, strict=True
                ):
                    if name is not None:
                        gradient = _sum(grads[m].pop(wire, []))
                        if gradient is None:  # Wanted by nothing that has a gradient.
                            gradient = tf.zeros_like(values[output])
                        values[name] = gradient
                if trace.loss_grad is not None:
                    dtype = trace.spec(trace.loss_grad).dtype
                    share = self._split.weight(m, dtype)
                    values[trace.loss_grad] = tf.cast(loss_grad, dtype) * share
            backward = self._programs(k, m).backward
            with tf.device(self._devices[k]), chain.after(k):
                made, accumulators[k] = backward(
                    values, accumulators[k], *self._rows(m)
                )
            chain.ran(k, [*made, *accumulators[k]])
            named = (
                wire
                for wire, name in zip(stage.reads, trace.input_grads, strict=True)
                if name is not None
            )
            for wire, gradient in zip(named, made, strict=True):
                grads[m].setdefault(wire, []).append(gradient)
        return [*self._input_grads(grads), *self._weight_grads(accumulators)]

    def _input_grads(
        self, grads: Sequence[Mapping[Wire, Sequence[tf.Tensor]]]
    ) -> list[tf.Tensor | None]:
        readers = self._first_readers()
        results: list[tf.Tensor | None] = []
        for wire in self._inputs:
            if wire not in grads[0]:
                results.append(None)
                continue
            with tf.device(self._devices[readers[wire]]):
                results.append(microbatch.join([_sum(row[wire]) for row in grads]))
        return results

    def _weight_grads(
        self, accumulators: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor | None]:
        """Returns one gradient a weight, that of a shared one summed at its owner."""
        sums: dict[int, list[tf.Tensor]] = {}
        for stage, traced, totals in zip(
            self._stages, self._traced, accumulators, strict=True
        ):
            grads = traced.trace.weight_grads
            weights = [v for v, g in zip(stage.weights, grads, strict=True) if g]
            for variable, gradient in zip(weights, totals, strict=True):
                sums.setdefault(id(variable), []).append(gradient)
        results: list[tf.Tensor | None] = []
        for key in self._before.trainable:
            with tf.device(self._devices[self._before.owners[key]]):
                results.append(_sum(sums.get(key, [])))
        return results

    def _programs(self, k: int, m: int) -> program.Programs:
        stage = self._traced[k]
        return stage.saving if self._saves[m] else stage.recomputing

    def _meeting(self, k: int, m: int) -> program.Values:
        """Returns how a stage meets its replicas on a microbatch, if it does."""
        trace, rows = self._traced[k].trace, self._split.sizes[m]
        if not trace.num_meetings:
            return {}
        with tf.device(self._devices[k]):
            zero = tf.minimum(rows, 0)  # A constant would be compiled in.
            parts = (
                self._tokens[k],
                zero + self._traced[k].group,
                zero + m * trace.num_meetings,
                tf.cast(rows > 0, tf.float32),
            )
        return dict(zip(trace.replicas, parts, strict=True))

    def _rows(self, m: int) -> list[tf.Tensor]:
        """Returns the size of a microbatch that may turn out empty, else nothing."""
        return [self._split.sizes[m]] if self._split.may_be_empty else []

    def _cut(self, tensors: Tensors, places: Mapping[Wire, int]) -> list[Tensors]:
        """Cuts mini-batch tensors into microbatches, each at the stage in `places`."""
        pieces: list[Tensors] = [{} for _ in self._split.sizes]
        for wire, tensor in tensors.items():
            if wire in places:
                with tf.device(self._devices[places[wire]]):
                    cut = self._split.cut(tensor)
                for row, piece in zip(pieces, cut, strict=True):
                    row[wire] = piece
        return pieces

    def _makers(self) -> dict[Wire, int]:
        """Returns which stage makes each value."""
        return {wire: k for k, t in enumerate(self._traced) for wire in t.makes}

    def _first_readers(self) -> dict[Wire, int]:
        """Returns which stage is the first to read each value."""
        stages = reversed(list(enumerate(self._traced)))
        return {wire: k for k, stage in stages for wire in stage.reads}


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


def _token() -> tf.Tensor:
    """Returns a resource that stands for an order, and holds nothing."""
    return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(), shared_name="order")


def _sum(parts: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Returns the sum of gradients, or None of none."""
    if len(parts) > 1:
        return tf.add_n(parts)
    return parts[0] if parts else None
