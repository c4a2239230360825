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
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.capture import Wire, differentiable
from tfgpipe.devices import device_kind
from tfgpipe.runtime import microbatch
from tfgpipe.runtime.carry import Carried, Change
from tfgpipe.runtime.snapshot import Snapshot
from tfgpipe.runtime.timer import Clock
from tfgpipe.schedules import Action, Schedule
from tfgpipe.stage import Program, Programs, Stage, TracedStage, Transfer, Values, total

Tensors = dict[Wire, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a mini-batch leaves behind.

    Attributes:
        outputs: The values that were wanted, and the masks on them, `[B, ...]` each.
        loss: The losses added by layers, averaged over the rows, or None.
        changes: What becomes of variables.
    """

    outputs: Tensors
    loss: tf.Tensor | None
    changes: list[Change]


@dataclasses.dataclass(frozen=True)
class TrainResult(Result):
    """What a mini-batch leaves behind that was run forward and backward.

    Attributes:
        main_loss: The loss that the last stage made.
        gradients: By `id` of a weight its gradient, None where nothing depends on it.
    """

    main_loss: tf.Tensor
    gradients: dict[int, tf.Tensor | None]


class Step:
    """The actions of one mini-batch, being emitted.

    Args:
        stages: The K stages.
        traced: The same, traced.
        shards: For each stage, the devices of its shards.
        wanted: Numbers of the values to return.
        schedule: The order of the actions.
        split: How the mini-batch is cut.
        before: The variables as they are before the step.
        saves: For a stage and a microbatch, whether its activations are kept.
        training: Whether to spare the time that preparing a backward takes.
        transfer: How values cross from stage to stage.
        clock: What to time actions with, if at all.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        traced: Sequence[TracedStage],
        *,
        shards: Sequence[Sequence[str]],
        wanted: Sequence[int],
        schedule: Schedule,
        split: microbatch.Split,
        before: Snapshot,
        saves: Callable[[int, int], bool],
        training: bool,
        transfer: Transfer,
        clock: Clock | None = None,
    ) -> None:
        self._stages = stages
        self._traced = traced
        self._shards = shards
        self._devices = devices = [lead for lead, *_ in shards]
        self._wanted = wanted
        self._schedule = schedule
        self._split = split
        self._before = before
        self._saves = saves
        self._transfer = transfer
        self._clock = clock
        self._carried = Carried(
            stages, traced, devices=devices, split=split, before=before
        )
        on_tpu = device_kind(devices[-1]) == "TPU"  # XLA has no such operation.
        self._chain = _Chain(functions.beginning() if training and not on_tpu else None)
        self._inputs: tuple[Wire, ...] = ()
        self._outputs: Tensors = {}
        # For each microbatch, the values made of it so far, and their gradients: one
        # from each stage that reads the value.
        self._pieces: list[Tensors] = []
        self._packed: list[dict[Wire, list[tf.Tensor]]] = [{} for _ in split.sizes]
        self._grads: list[dict[Wire, list[tf.Tensor]]] = []
        # For each stage k and microbatch m, what its programs need, by name.
        self._kept: dict[tuple[int, int], Values] = {}
        self._added: list[tf.Tensor] = []
        self._loss_grad: tf.Tensor | None = None
        # For each stage, what it made once, the gradients of its weights as far as they
        # are summed, and how many microbatches are not in that sum.
        self._lasting: list[Values] = [{} for _ in stages]
        self._sums: list[list[tf.Tensor]] = []
        self._missing: list[int] = []

    def forward(self, inputs: Tensors) -> tuple[Tensors, tf.Tensor | None]:
        """Emits the forward actions; returns what is wanted `[B, ...]` and the loss."""
        self._take(inputs)
        for action in self._schedule.actions("forward"):
            self._forward(action)
        self._join_outputs()
        return self._outputs, self._added_loss()

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
        self._grads = [
            {wire: [piece] for wire, piece in row.items()}
            for row in self._cut(wanted, self._makers())
        ]
        self._loss_grad = loss_grad
        self._begin_sums()
        # The outputs, on which these gradients depend, come after all forwards.
        self._chain = _Chain()
        with functions.gradient():
            for action in self._schedule.actions("backward"):
                self._backward(action)
        return [*self._input_grads(), *self._weight_grads()]

    def train(
        self,
        inputs: Tensors,
        *,
        loss: Wire,
        loss_grad: tf.Tensor,
        added_loss_grad: tf.Tensor,
    ) -> TrainResult:
        """Emits all actions, in the order of the schedule.

        Args:
            inputs: What is given, `[B, ...]` each.
            loss: The value, `[1]` of each microbatch, whose sum is the loss.
            loss_grad: The gradient of the loss.
            added_loss_grad: The gradient of the losses that layers add.
        """
        self._take(inputs)
        with tf.device(self._devices[-1]):
            self._grads = [{loss: [loss_grad[None]]} for _ in self._pieces]
        self._loss_grad = added_loss_grad
        self._begin_sums()
        for action in self._schedule.slots:
            if action.kind == "forward":
                self._forward(action)
            else:
                self._backward(action)
            if action.kind in ("backward", "backward_weight"):
                del self._kept[action.stage, action.microbatch]
        self._join_outputs()
        with tf.device(self._devices[-1]):
            main_loss = tf.add_n([tf.reduce_sum(row[loss]) for row in self._pieces])
        return TrainResult(
            outputs=self._outputs,
            loss=self._added_loss(),
            changes=self.changes(),
            main_loss=main_loss,
            gradients=dict(
                zip(self._before.trainable, self._weight_grads(), strict=True)
            ),
        )

    def changes(self) -> list[Change]:
        """Returns what the forward actions have made of variables."""
        return self._carried.changes()

    def _take(self, inputs: Tensors) -> None:
        self._inputs = tuple(inputs)
        self._pieces = self._cut(inputs, self._first_readers())

    def _forward(self, action: Action) -> None:
        """Emits a forward action."""
        k, m = action.stage, action.microbatch
        stage, trace = self._traced[k], self._traced[k].trace
        values = {**self._carried.values(k, m), **self._received(k, m)}
        made, _ = self._run(action, values, [])
        values.update(made)
        self._kept[k, m] = values
        for wire, name in zip(stage.makes, trace.outputs, strict=True):
            self._pieces[m][wire] = values[name]
            if wire in self._crossing:
                with tf.device(self._devices[k]):
                    self._packed[m][wire] = self._transfer.pack(values[name])
        self._carried.advance(k, values)
        if trace.loss is not None:
            with tf.device(self._devices[k]):
                loss = values[trace.loss]
                self._added.append(loss * self._split.weight(m, loss.dtype))

    def _backward(self, action: Action) -> None:
        """Emits a backward action, or one half of it."""
        k, m = action.stage, action.microbatch
        stage, values = self._traced[k], self._kept[k, m]
        if action.kind != "backward_weight":
            values = self._kept[k, m] = {**values, **self._given_grads(k, m)}
        if action.kind == "backward_input":
            made, _ = self._run(action, values, [])
            values.update(made)
        else:
            self._missing[k] -= 1
            made, self._sums[k] = self._run(action, values, self._sums[k])
        for wire, name in zip(stage.reads, stage.trace.input_grads, strict=True):
            if name in made:
                gradient = self._sent_back(k, wire, made[name])
                self._grads[m].setdefault(wire, []).append(gradient)

    def _run(
        self, action: Action, values: Values, sums: Sequence[tf.Tensor]
    ) -> tuple[Values, list[tf.Tensor]]:
        """Emits the program of an action behind the action before on its device.

        Args:
            action: The action.
            values: What its program takes, and maybe more.
            sums: What it adds to.

        Returns:
            What it makes, and the sums with its addends; with the last, the gradients.
        """
        k, m = action.stage, action.microbatch
        programs = self._programs(k, m)
        run = getattr(programs, action.kind)
        ends = bool(sums) and not self._missing[k] and not programs.sums.is_final
        devices = self._shards[k]
        made: Values = {}

        def emit(feeds: Values) -> list[tf.Tensor]:
            nonlocal sums
            results, sums = run(feeds, sums, *self._rows(m), devices=devices)
            if ends:
                once = self._made_once(k, programs, programs.end, values)
                end = programs.end
                _, sums = end({**values, **once}, sums, devices=devices)
            made.update(results)
            return [*results.values(), *sums]

        p = self._schedule.placement[k]
        with tf.device(self._devices[k]), self._chain.after(p):
            values = {**values, **self._made_once(k, programs, run, values)}
            feeds = {name: values[name] for name in run.feeds}
            if self._clock is None:
                done = emit(feeds)
            else:
                recomputes = action.kind in ("backward", "backward_input")
                recomputes = recomputes and not self._saves(k, m)
                done = [
                    self._clock.time(
                        action, devices, feeds, emit, recomputes=recomputes
                    )
                ]
            self._chain.ran(p, done, everywhere=self._traced[k].trace.is_sharded)
        return made, list(sums)

    def _received(self, k: int, m: int) -> Values:
        """Returns what a stage reads of a microbatch, as it arrives there."""
        stage = self._traced[k]
        received = {}
        for wire, name in zip(stage.reads, stage.trace.inputs, strict=True):
            if wire not in self._crossing:
                received[name] = self._pieces[m][wire]
                continue
            # Restored when it is the stage's turn: until then it is small.
            after = self._chain.after(self._schedule.placement[k])
            with tf.device(self._devices[k]), after:
                packed, spec = self._packed[m][wire], stage.trace.spec(name)
                received[name] = self._transfer.unpack(packed, spec)
        return received

    def _sent_back(self, k: int, wire: Wire, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the gradient of what a stage read, as it arrives at its maker."""
        if wire not in self._crossing:
            return gradient
        with tf.device(self._devices[k]):
            packed = self._transfer.pack_gradient(gradient)
        with tf.device(self._devices[self._crossing[wire]]):
            return self._transfer.unpack_gradient(packed, gradient.dtype)

    def _given_grads(self, k: int, m: int) -> Values:
        """Returns the gradients of what a stage made of a microbatch."""
        stage, trace = self._traced[k], self._traced[k].trace
        given = {}
        with tf.device(self._devices[k]):
            for wire, output, name in zip(
                stage.makes, trace.outputs, trace.output_grads, strict=True
            ):
                if name is not None:
                    gradient = _sum(self._grads[m].pop(wire, []))
                    if gradient is None:  # Wanted by nothing that has a gradient.
                        gradient = tf.zeros_like(self._kept[k, m][output])
                    given[name] = gradient
            if trace.loss_grad is not None:
                dtype = trace.spec(trace.loss_grad).dtype
                share = self._split.weight(m, dtype)
                given[trace.loss_grad] = tf.cast(self._loss_grad, dtype) * share
        return given

    def _join_outputs(self) -> None:
        # A mask that a later stage took off its tensor is off the output as well.
        gone = {Wire(n, is_mask=True) for t in self._traced for n in t.unmasked}
        for wire, k in self._makers().items():
            if wire.number in self._wanted and wire not in gone:
                with tf.device(self._devices[k]):
                    pieces = [row[wire] for row in self._pieces]
                    self._outputs[wire] = microbatch.join(pieces)

    def _added_loss(self) -> tf.Tensor | None:
        with tf.device(self._devices[-1]):
            return total(self._added)

    def _made_once(
        self, k: int, programs: Programs, run: Program, values: Values
    ) -> Values:
        """Returns what lasts for the step, with all that a program takes of it."""
        made = self._lasting[k]
        there = {**values, **made}
        made.update(programs.made_once(run, there, self._shards[k]))
        return made

    def _begin_sums(self) -> None:
        self._sums = []
        self._missing = [len(self._split.sizes)] * len(self._stages)
        for k, devices in enumerate(self._shards):
            self._sums.append(self._programs(k, 0).sums.begin(devices))

    def _input_grads(self) -> list[tf.Tensor | None]:
        readers = self._first_readers()
        results: list[tf.Tensor | None] = []
        for wire in self._inputs:
            if wire not in self._grads[0]:
                results.append(None)
                continue
            with tf.device(self._devices[readers[wire]]):
                sums = [_sum(row[wire]) for row in self._grads]
                results.append(microbatch.join(sums))
        return results

    def _weight_grads(self) -> list[tf.Tensor | None]:
        """Returns one gradient a weight, that of a shared one summed at its owner."""
        sums: dict[int, list[tf.Tensor]] = {}
        for stage, traced, totals in zip(
            self._stages, self._traced, self._sums, strict=True
        ):
            grads = traced.trace.weight_grads
            weights = [v for v, g in zip(stage.weights, grads, strict=True) if g]
            for variable, gradient in zip(weights, totals, strict=True):
                sums.setdefault(id(variable), []).append(gradient)
        results: list[tf.Tensor | None] = []
        for key in self._before.trainable:
            with tf.device(self._before.devices[key]):
                results.append(_sum(sums.get(key, [])))
        return results

    def _programs(self, k: int, m: int) -> Programs:
        stage = self._traced[k]
        return stage.saving if self._saves(k, m) else stage.recomputing

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

    @functools.cached_property
    def _crossing(self) -> dict[Wire, int]:
        """The values that are compressed on their way, with the stage of each."""
        read = {wire for stage in self._traced for wire in stage.reads}
        return {
            wire: k
            for k, stage in enumerate(self._traced)
            for wire, spec in stage.output_specs.items()
            if wire in read and self._transfer.packs(wire.number, spec)
        }

    def _first_readers(self) -> dict[Wire, int]:
        """Returns which stage is the first to read each value."""
        stages = reversed(list(enumerate(self._traced)))
        return {wire: k for k, stage in stages for wire in stage.reads}


class _Chain:
    """Orders the actions of each device one after another."""

    def __init__(self, beginning: tf.Operation | None = None) -> None:
        self._beginning = [] if beginning is None else [beginning]
        self._last: dict[int, list[tf.Operation]] = {}

    def after(self, device: int) -> contextlib.AbstractContextManager[Any]:
        """Operations created inside run after the last action on a device."""
        return tf.control_dependencies(self._last.get(device, self._beginning))

    def ran(
        self, device: int, results: Sequence[tf.Tensor], *, everywhere: bool
    ) -> None:
        """Notes the results of the newest action on a device, if it has any.

        Args:
            device: The device.
            results: The results.
            everywhere: Whether they are of several operations, on all shards.
        """
        if tf.executing_eagerly() or not results:
            return
        if everywhere and len(results) > 1:
            # One operation a shard, for each of the next action's to wait for.
            places: dict[str, list[tf.Operation]] = {}
            for result in results:
                places.setdefault(result.op.device, []).append(result.op)
            self._last[device] = []
            for place, operations in places.items():
                with tf.device(place), tf.control_dependencies(operations):
                    self._last[device].append(tf.no_op())
        else:
            self._last[device] = [results[0].op]


def _sum(parts: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Returns the sum of gradients, or None of none."""
    if len(parts) > 1:
        return tf.add_n(parts)
    return parts[0] if parts else None
