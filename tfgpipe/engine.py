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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import microbatch, program, schedule
from tfgpipe.replay import Wire
from tfgpipe.stage import BatchNorm, Mode, Remat, Stage, TracedStage, trace_all
from tfgpipe.trace import differentiable, total

Tensors = dict[Wire, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a mini-batch leaves behind.

    Attributes:
        outputs: The values that were wanted, and the masks on them, `[B, ...]` each.
        loss: The losses added by layers, averaged over the rows, or None.
        new_state: For each changed variable, its value after the last microbatch.
    """

    outputs: Tensors
    loss: tf.Tensor | None
    new_state: list[tuple[keras.Variable, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages on devices, and how a mini-batch goes through them.

    Attributes:
        stages: The K stages.
        wanted: Numbers of the values to return.
        devices: For each stage, the device of the replica being built.
        num_microbatches: M.
        remat: What the backward recomputes.
        jit_compile: For each stage, whether XLA compiles its programs.
        batch_norm: When moving averages of batch statistics move.
    """

    stages: Sequence[Stage]
    wanted: Sequence[int]
    devices: Sequence[str]
    num_microbatches: int
    remat: Remat
    jit_compile: Sequence[bool]
    batch_norm: BatchNorm = "microbatch"

    def run(self, inputs: Mapping[Wire, tf.Tensor], *, training: bool) -> Result:
        """Runs a mini-batch through all stages, differentiably.

        Args:
            inputs: The values that are given and the masks on them, `[B, ...]` each.
            training: Whether layers run as in training.

        Raises:
            ValueError: If two stages share a variable that one of them changes.
        """
        first = next(iter(inputs.values()))
        split = microbatch.split_rows(first, self.num_microbatches)
        traced = self._trace(inputs, split, training=training)
        snapshot = self._snapshot(traced)
        step = _Step(self, traced, split, snapshot, saves=self._saves(training))
        changed: list[tuple[keras.Variable, tf.Tensor]] = []
        made: list[Wire] = []

        @tf.custom_gradient
        def run(*tensors: tf.Tensor) -> Any:
            outputs, loss = step.forward(dict(zip(inputs, tensors, strict=False)))
            # Not differentiated, so they need not be results of this function.
            changed.extend(step.changed_state())
            made.extend(outputs)

            # TensorFlow passes `variables` if it finds one behind the results, such as
            # a frozen weight, and then wants a gradient for it.
            def gradient(*output_grads: tf.Tensor, variables: Any = None) -> Any:
                grads = step.backward(
                    output_grads[: len(outputs)],
                    None if loss is None else output_grads[-1],
                )
                return grads if variables is None else (grads, [None] * len(variables))

            return [*outputs.values(), *([] if loss is None else [loss])], gradient

        with tf.device(self.devices[-1]):
            results = run(*inputs.values(), *snapshot.weights())
        outputs = dict(zip(made, results, strict=False))
        loss = results[len(made)] if len(results) > len(made) else None
        # An input that is wanted as it is goes through no stage.
        passed = {wire: x for wire, x in inputs.items() if wire.number in self.wanted}
        return Result({**passed, **outputs}, loss, changed)

    def _trace(
        self,
        inputs: Mapping[Wire, tf.Tensor],
        split: microbatch.Split,
        *,
        training: bool,
    ) -> list[TracedStage]:
        size = split.static_size
        specs = {
            wire: tf.TensorSpec([size, *x.shape[1:]], x.dtype)
            for wire, x in inputs.items()
        }
        modes = [
            Mode(
                training=training,
                per_layer=self.remat == "layer",
                may_be_empty=split.may_be_empty,
                jit_compile=jit_compile,
                batch_norm=self.batch_norm,
            )
            for jit_compile in self.jit_compile
        ]
        return trace_all(self.stages, specs, modes)

    def _snapshot(self, traced: Sequence[TracedStage]) -> _Snapshot:
        """Reads every variable as it is before the step, on its first stage's device.

        Raises:
            ValueError: If two stages share a variable that one of them changes.
        """
        owners: dict[int, int] = {}
        values: dict[int, tf.Tensor] = {}
        for k, stage in enumerate(self.stages):
            for variable in (*stage.weights, *stage.state):
                if id(variable) not in owners:
                    owners[id(variable)] = k
                    with tf.device(self.devices[k]):
                        values[id(variable)] = tf.identity(variable.value)
        for k, stage in enumerate(self.stages):
            for variable in traced[k].changed(stage.state):
                users = [s.index for s in self.stages if _holds(s, variable)]
                if len(users) > 1:
                    raise ValueError(
                        "Stages can share weights, but not what a step changes, since "
                        "each stage would advance it from the same value. Received "
                        f"'{variable.path}' in stages {users}. Use a layer of its own "
                        "in each, or a `balance` that keeps them together."
                    )
        weights = {id(v): None for stage in self.stages for v in stage.weights}
        return _Snapshot(values, owners, tuple(weights))

    def _saves(self, training: bool) -> Sequence[bool]:
        """Returns for each microbatch whether its activations are kept."""
        last = self.num_microbatches - 1
        if not training or self.remat in ("stage", "layer"):
            return [False] * self.num_microbatches
        if self.remat == "none":
            return [True] * self.num_microbatches
        return [m == last for m in range(self.num_microbatches)]


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """Variables, by `id`, as they were before a step.

    Attributes:
        values: Their values.
        owners: The first stage that uses each.
        trainable: Those that are weights.
    """

    values: dict[int, tf.Tensor]
    owners: dict[int, int]
    trainable: tuple[int, ...]

    def weights(self) -> list[tf.Tensor]:
        """Returns the values of the weights."""
        return [self.values[key] for key in self.trainable]


class _Step:
    """The actions of one mini-batch, being emitted."""

    def __init__(
        self,
        pipeline: Pipeline,
        traced: Sequence[TracedStage],
        split: microbatch.Split,
        snapshot: _Snapshot,
        saves: Sequence[bool],
    ) -> None:
        self._pipeline = pipeline
        self._devices = pipeline.devices
        self._traced = traced
        self._split = split
        self._snapshot = snapshot
        self._schedule = schedule.gpipe(len(traced), len(split.sizes))
        self._saves = saves[-len(split.sizes) :]
        # For each stage, its variables by the name they have in its trace, and what
        # it gathers.
        self._variables = [
            dict(
                zip(
                    (*t.trace.weights, *t.trace.state),
                    [snapshot.values[id(v)] for v in (*stage.weights, *stage.state)],
                    strict=True,
                )
            )
            for t, stage in zip(traced, pipeline.stages, strict=True)
        ]
        for k, device in enumerate(self._devices):
            with tf.device(device):
                gathered = program.nothing_gathered(traced[k].trace)
            self._variables[k].update(gathered)
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
            values = dict(self._variables[k])
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
            if wire.number in self._pipeline.wanted and wire not in gone:
                with tf.device(self._devices[k]):
                    self._outputs[wire] = microbatch.join([row[wire] for row in pieces])
        with tf.device(self._devices[-1]):
            return self._outputs, total(losses)

    def changed_state(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the variables that the forward actions changed, with new values."""
        changed = [
            (variable, values[before])
            for stage, traced, values in zip(
                self._pipeline.stages, self._traced, self._variables, strict=True
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
        latest = dict(self._snapshot.values)
        for traced, values in zip(self._traced, self._variables, strict=True):
            trace = traced.trace
            for statistic, names in zip(trace.statistics, trace.gathered, strict=True):
                keys = [id(variable) for variable in statistic.variables]
                owner = self._snapshot.owners[keys[0]]
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
            self._pipeline.stages, self._traced, accumulators, strict=True
        ):
            grads = traced.trace.weight_grads
            weights = [v for v, g in zip(stage.weights, grads, strict=True) if g]
            for variable, gradient in zip(weights, totals, strict=True):
                sums.setdefault(id(variable), []).append(gradient)
        results: list[tf.Tensor | None] = []
        for key in self._snapshot.trainable:
            with tf.device(self._devices[self._snapshot.owners[key]]):
                results.append(_sum(sums.get(key, [])))
        return results

    def _programs(self, k: int, m: int) -> program.Programs:
        stage = self._traced[k]
        return stage.saving if self._saves[m] else stage.recomputing

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


def _sum(parts: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Returns the sum of gradients, or None of none."""
    if len(parts) > 1:
        return tf.add_n(parts)
    return parts[0] if parts else None


def _holds(stage: Stage, variable: keras.Variable) -> bool:
    return any(variable is other for other in stage.state)
