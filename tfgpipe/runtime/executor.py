"""The schedule executor: the actions of a step as TensorFlow operations, in order.

    device 0   F0 ─▶ F1 ─▶ F2 ─▶ F3 ············ B3 ─▶ B2 ─▶ B1 ─▶ B0
                 ╲     ╲     ╲     ╲            ╱     ╱     ╱     ╱
    device 1      F0 ─▶ F1 ─▶ F2 ─▶ F3 ─▶ B3 ─▶ B2 ─▶ B1 ─▶ B0

Along a row, control dependencies: TensorFlow runs whatever is ready, so without them a
device would start all microbatches at once, holding the activations of all of them.
Between rows there is only data: a result is sent as soon as it is ready, to each device
that reads it, while its own goes on with the next microbatch.

What a stage computes is in `stage_run`; here tensors find their way between stages.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe._util import IdentityMap
from tfgpipe.capture import TensorKey, stack_losses
from tfgpipe.devices import host_device, small_functions
from tfgpipe.graph import joint_graph
from tfgpipe.runtime import microbatch
from tfgpipe.runtime.stage_run import StageRun
from tfgpipe.runtime.state import VariableUpdate, variable_updates
from tfgpipe.runtime.step import Step
from tfgpipe.runtime.timer import StepTimer
from tfgpipe.schedules import Action
from tfgpipe.stage import NamedTensors

Tensors = dict[TensorKey, tf.Tensor]
# AutoGraph converts whatever a `tf.function` calls, which takes longer than to call it.
# No layer of a user is called here, so nothing is to be converted.
_not_converted = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a forward pass over a mini-batch.

    Attributes:
        outputs: The values that were wanted, and the masks on them, `[B, ...]` each.
        loss: The losses added by layers that are means over the examples, or None.
        updates: The new values of variables.
    """

    outputs: Tensors
    loss: tf.Tensor | None
    updates: list[VariableUpdate]


@dataclasses.dataclass(frozen=True)
class TrainStepResult(StepResult):
    """The result of a forward and backward pass over a mini-batch.

    Attributes:
        compiled_loss: The loss that the last stage computed, and with it the added
            losses that are sums.
        gradients: The gradient of each weight, None where nothing depends on it.
    """

    compiled_loss: tf.Tensor
    gradients: IdentityMap[keras.Variable, tf.Tensor | None]


class Executor:
    """Emits the actions of a step, once.

    Args:
        step: The step.
        timer: The clock readings of its actions, or None.
    """

    def __init__(self, step: Step, timer: StepTimer | None = None) -> None:
        self.step = step
        self._runs = [StageRun(step, k) for k in range(len(step.traced))]
        self._timer = timer
        self._order = _DeviceOrder(step.start_dependency)
        self._inputs: Tensors = {}
        # For each microbatch, the values made of it so far, the encodings of those that
        # are encoded, and gradients: one from each stage that reads the value.
        self._values: list[Tensors] = []
        self._encodings: list[dict[TensorKey, list[tf.Tensor]]] = []
        self._grads: list[dict[TensorKey, list[tf.Tensor]]] = []
        self._mean_losses: list[tf.Tensor] = []
        self._summed_losses: list[tf.Tensor] = []
        self._mean_loss_grad: tf.Tensor | None = None
        self._summed_loss_grad: tf.Tensor | None = None

    @property
    def summed_loss(self) -> tf.Tensor | None:
        """The sum of the added losses that are sums over the examples, or None."""
        return self._sum(self._summed_losses)

    @_not_converted
    def forward(self, inputs: Mapping[TensorKey, tf.Tensor]) -> StepResult:
        """Emits the forward actions; returns their results."""
        self._split_inputs(inputs)
        self._run(self.step.schedule.actions(is_backward=False))
        outputs = self._join_outputs()
        # A backward reads what stages have saved.
        self._values, self._encodings = [], []
        return StepResult(outputs, self._sum(self._mean_losses), self._updates())

    @_not_converted
    def backward(
        self,
        output_grads: Tensors,
        loss_grad: tf.Tensor | None,
        summed_loss_grad: tf.Tensor | None,
        *,
        frees: bool = False,
    ) -> list[tf.Tensor | None]:
        """Emits the backward actions, after `forward`.

        Args:
            output_grads: The gradients of outputs that have one.
            loss_grad: Gradient of the sum of those added losses that are means.
            summed_loss_grad: Gradient of the sum of those that are sums.
            frees: True if no other gradient needs what this one has used.

        Returns:
            Gradients of the inputs, then of the weights.
        """
        self._grads = [
            {key: [tensor] for key, tensor in row.items()}
            for row in self._split_values(output_grads, self.step.producers)
        ]
        self._mean_loss_grad, self._summed_loss_grad = loss_grad, summed_loss_grad
        # These gradients depend on the outputs, which come after all forwards.
        self._order = _DeviceOrder()
        for run in self._runs:
            run.begin_backward()
        with functions.gradient_calls():
            self._run(self.step.schedule.actions(is_backward=True), frees=frees)
        return [*self._input_grads(), *self._weight_grads().values()]

    @_not_converted
    def train(
        self,
        inputs: Mapping[TensorKey, tf.Tensor],
        *,
        loss: TensorKey,
        loss_grad: tf.Tensor,
        added_loss_grad: tf.Tensor,
        grads: Tensors | None = None,
    ) -> TrainStepResult:
        """Emits all actions, in the order of the schedule.

        Args:
            inputs: The inputs, `[B, ...]` each but for those per step.
            loss: The value, `[1]` of each microbatch, whose sum is the loss.
            loss_grad: The gradient of the loss, and of the losses that layers add and
                that are sums.
            added_loss_grad: The gradient of those that are means.
            grads: Gradients of other values, `[B, ...]` each.
        """
        self._split_inputs(inputs)
        last = self._runs[-1].device
        first_grad = small_functions.run_on(last, tf.expand_dims, loss_grad, 0)
        self._grads = [
            {loss: [first_grad], **{key: [tensor] for key, tensor in row.items()}}
            for row in self._split_values(grads or {}, self.step.producers)
        ]
        self._mean_loss_grad, self._summed_loss_grad = added_loss_grad, loss_grad
        for run in self._runs:
            run.begin_backward()
        self._run(self.step.schedule.slots, frees=True)
        outputs = {**self.step.passed_through(inputs), **self._join_outputs()}
        losses = [row[loss] for row in self._values]
        summed = list(joint_graph.not_none(self.summed_loss))
        main_loss = small_functions.run_on(last, _total_loss, losses, summed)
        return TrainStepResult(
            outputs=outputs,
            loss=self._sum(self._mean_losses),
            updates=self._updates(),
            compiled_loss=main_loss,
            gradients=self._weight_grads(),
        )

    def _run(self, actions: Iterable[Action], *, frees: bool = False) -> None:
        """Runs actions, in an order in which each comes after what it needs.

        Args:
            actions: The actions.
            frees: True to free the tensors that a backward has used, as no other
                gradient needs them.
        """
        # Times are those of calls.
        inlines = self.step.is_small and self._timer is None
        with functions.inlined_calls() if inlines else contextlib.nullcontext():
            for action in actions:
                action.kind.run(self, action)
                if frees and action.kind.is_pass and action.kind.in_flight < 0:
                    del self._runs[action.stage].saved[action.microbatch]

    def run_pass(self, action: Action) -> None:
        """Runs the stage function of an action, and passes its results on."""
        if action.kind.is_backward:
            self._backward(action)
        else:
            self._forward(action)

    def copy_saved(self, action: Action, *, to_host: bool) -> None:
        """Copies what a stage saved of a microbatch to the host, or back."""
        run, m = self._runs[action.stage], action.microbatch
        held = run.saved[m]

        def copied(tensors: NamedTensors) -> list[tf.Tensor]:
            copies = []
            for name, tensor in tensors.items():
                home = run.home(name, tensor)
                ends = (home, host_device(home))
                # What another stage made comes to this device first. What goes back
                # waits on the host, so that it takes no memory before its time.
                for device in ends if to_host else reversed(ends):
                    with tf.device(device):
                        tensor = tf.identity(tensor)
                copies.append(tensor)
            return copies

        names = run.read_later(m)
        copies = self.emit(action, {x: held[x] for x in names}, copied)
        run.saved[m] = {**held, **dict(zip(names, copies, strict=True))}

    def gather_weights(self, action: Action) -> None:
        """Gathers the weights of a stage that are in slices, for later passes."""
        run = self._runs[action.stage]
        if run.sliced:
            tensors = self.emit(action, {}, lambda _: run.gather())
            run.waiting[action] = dict(zip(run.sliced, tensors, strict=True))

    def saved(self, k: int) -> dict[int, NamedTensors]:
        """Returns by microbatch in flight the tensors that stage k holds of it."""
        return self._runs[k].saved

    def _split_inputs(self, inputs: Mapping[TensorKey, tf.Tensor]) -> None:
        """Splits the inputs, each at the first stage that reads it."""
        self._inputs = dict(inputs)
        whole = {w: x for w, x in inputs.items() if w.value_id in self.step.per_step}
        examples = {w: x for w, x in inputs.items() if w not in whole}
        self._values = self._split_values(examples, self.step.first_consumers)
        self._encodings = [{} for _ in self._values]
        for values in self._values:
            values.update(whole)

    def _forward(self, action: Action) -> None:
        """Emits a forward action."""
        k, m = action.stage, action.microbatch
        run = self._runs[k]
        values = {**run.carry.values(m), **self._receive(k, m)}
        values.update(run.run_host_part(m, values))
        values.update(self._emit_pass(action, values))
        run.saved[m] = values
        for key, name in zip(
            run.traced.output_keys, run.trace.forward.outputs, strict=True
        ):
            self._values[m][key] = values[name]
            if key in self.step.encoded:
                self._encodings[m][key] = small_functions.run_on(
                    run.device, self.step.boundary.codec.encode, values[name]
                )
        run.carry.advance(values)
        if run.trace.forward.loss is not None:
            are_sums = tuple(self.step.are_sums[k])
            losses = values[run.trace.forward.loss]
            weighted = small_functions.run_on(
                run.device, _weighted_losses, losses, are_sums, self.step.split, m
            )
            for loss, is_sum in zip(weighted, are_sums, strict=True):
                (self._summed_losses if is_sum else self._mean_losses).append(loss)

    def _backward(self, action: Action) -> None:
        """Emits a backward action, or one half of it."""
        k, m = action.stage, action.microbatch
        run = self._runs[k]
        if action.kind.sends:
            run.saved[m] = {**run.saved[m], **self._output_grads(k, m)}
        made = self._emit_pass(action, run.saved[m])
        if action.kind.in_backward > 0:
            run.saved[m].update(made)
        names = run.trace.backward.input_grads
        for key, name in zip(run.traced.input_keys, names, strict=True):
            if name in made:
                gradient = self._receive_gradient(k, key, made[name])
                self._grads[m].setdefault(key, []).append(gradient)

    def _emit_pass(self, action: Action, values: NamedTensors) -> NamedTensors:
        """Emits the stage function of an action on values; returns its results."""
        run, m = self._runs[action.stage], action.microbatch
        run.take_gathered(self.step.schedule.dependencies(action))
        made: NamedTensors = {}

        def compute(feeds: NamedTensors) -> list[tf.Tensor]:
            results, sums = run.run(action, feeds)
            made.update(results)
            return [*made.values(), *sums]

        with self._after_last(action.stage):
            feeds = run.feeds(action.kind, m, values)
        self.emit(action, feeds, compute)
        return made

    def emit(
        self,
        action: Action,
        tensors: NamedTensors,
        function: Callable[[NamedTensors], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Emits the operations of an action, behind the last action on its device.

        A copy that frees memory is not behind it, and one that takes memory is not
        waited for: see `ActionKind.is_copy`.

        Args:
            action: The action.
            tensors: The tensors that it reads, by name.
            function: Emits the operations on these tensors. Returns the results that
                another action should wait for.
        """
        run, kind = self._runs[action.stage], action.kind
        here = run.device
        other = host_device(here) if kind.is_copy else here
        frees = kind.is_copy and kind.in_flight < 0
        begins, ends = (here, other) if frees else (other, here)
        with tf.device(here) if frees else self._after_last(action.stage):
            if self._timer is None:
                results = done = function(tensors)
            else:
                tensors, start = self._timer.start(
                    action, begins, run.devices[1:], tensors
                )
                with tf.control_dependencies([start]):
                    results = function(tensors)
                recomputes = kind.recomputes and run.recomputes(action.microbatch)
                done = [
                    self._timer.end(action, ends, start, results, recomputes=recomputes)
                ]
            p = self.step.schedule.placement[action.stage]
            if not kind.is_copy:
                self._order.record(p, done, is_sharded=run.trace.is_sharded)
            elif frees:
                self._order.add(p, done)
        return results

    @contextlib.contextmanager
    def _after_last(self, k: int) -> Iterator[None]:
        """Operations inside are on stage k's device, behind its last action."""
        p = self.step.schedule.placement[k]
        with tf.device(self._runs[k].device), self._order.after(p):
            yield

    def _receive(self, k: int, m: int) -> NamedTensors:
        """Returns a stage's inputs for a microbatch, as they arrive on its device."""
        run = self._runs[k]
        received = {}
        for key, name in zip(
            run.traced.input_keys, run.trace.given.inputs, strict=True
        ):
            if key not in self.step.encoded:
                received[name] = self._values[m][key]
                continue
            with self._after_last(k):  # Until the stage runs it is small.
                received[name] = small_functions.run_on(
                    run.device,
                    self.step.boundary.codec.decode,
                    self._encodings[m][key],
                    run.trace.spec(name),
                )
        return received

    def _receive_gradient(
        self, k: int, key: TensorKey, gradient: tf.Tensor
    ) -> tf.Tensor:
        """Returns the gradient of a stage's input, as it arrives at its producer."""
        if key not in self.step.encoded:
            return gradient
        codec, producer = self.step.boundary.codec, self._runs[self.step.encoded[key]]
        encoded = small_functions.run_on(
            self._runs[k].device, codec.encode_gradient, gradient
        )
        return small_functions.run_on(
            producer.device, codec.decode_gradient, encoded, gradient.dtype
        )

    def _output_grads(self, k: int, m: int) -> NamedTensors:
        """Returns the gradients of a stage's outputs for a microbatch."""
        run = self._runs[k]
        forward, backward = run.trace.forward, run.trace.backward
        given = {}
        for key, output, name in zip(
            run.traced.output_keys,
            forward.outputs,
            backward.output_grads,
            strict=True,
        ):
            if name is not None:
                gradient = _sum(self._grads[m].pop(key, []), run.device)
                if gradient is None:  # No consumer has a gradient for it.
                    gradient = small_functions.run_on(
                        run.device, _zeros_like, run.saved[m][output]
                    )
                given[name] = gradient
        if backward.loss_grad is not None:
            given[backward.loss_grad] = small_functions.run_on(
                run.device,
                _weighted_loss_grads,
                [self._mean_loss_grad, self._summed_loss_grad],
                tuple(self.step.are_sums[k]),
                self.step.split,
                m,
                run.trace.spec(backward.loss_grad).dtype,
            )
        return given

    def _join_outputs(self) -> Tensors:
        """Returns the outputs that stages have made, `[B, ...]` each."""
        outputs = {}
        for key, k in self.step.returned.items():
            tensors = [values[key] for values in self._values]
            outputs[key] = small_functions.run_on(
                self._runs[k].device, microbatch.join, tensors
            )
        return outputs

    def _updates(self) -> list[VariableUpdate]:
        return variable_updates([run.carry for run in self._runs])

    def _sum(self, losses: Sequence[tf.Tensor]) -> tf.Tensor | None:
        if not losses:
            return None
        return small_functions.run_on(self._runs[-1].device, _sum_losses, list(losses))

    def _input_grads(self) -> list[tf.Tensor | None]:
        results: list[tf.Tensor | None] = []
        for key in self._inputs:
            if key not in self._grads[0]:
                results.append(None)
                continue
            device = self._runs[self.step.first_consumers[key]].device
            sums = [_sum(row[key], device) for row in self._grads]
            results.append(small_functions.run_on(device, microbatch.join, sums))
        return results

    def _weight_grads(self) -> IdentityMap[keras.Variable, tf.Tensor | None]:
        """Returns one gradient per weight, summed at the owner if it is shared."""
        parts: IdentityMap[keras.Variable, list[tf.Tensor]] = IdentityMap()
        for run in self._runs:
            names = run.trace.backward.weight_grads
            weights = [v for v, g in zip(run.variables, names, strict=False) if g]
            for variable, gradient in zip(weights, run.gradients, strict=True):
                parts.setdefault(variable, []).append(gradient)
        results: IdentityMap[keras.Variable, tf.Tensor | None] = IdentityMap()
        for variable in self.step.initial_state.trainable:
            device = self.step.initial_state.devices[variable]
            results[variable] = _sum(parts.get(variable, []), device)
        return results

    def _split_values(
        self, tensors: Mapping[TensorKey, tf.Tensor], stages: Mapping[TensorKey, int]
    ) -> list[Tensors]:
        """Splits mini-batch tensors into microbatches, each at one of `stages`."""
        rows: list[Tensors] = [{} for _ in self.step.split.sizes]
        for key, tensor in tensors.items():
            if key in stages:
                device = self._runs[stages[key]].device
                parts = small_functions.run_on(device, self.step.split.split, tensor)
                for row, part in zip(rows, parts, strict=True):
                    row[key] = part
        return rows


class _DeviceOrder:
    """Control dependencies that order the actions of each device."""

    def __init__(self, start_dependency: tf.Operation | None = None) -> None:
        self._first = [] if start_dependency is None else [start_dependency]
        self._last: dict[int, list[tf.Operation]] = {}

    def after(self, device: int) -> contextlib.AbstractContextManager[Any]:
        """Operations created inside run after the last action of a device."""
        return tf.control_dependencies(self._last.get(device, self._first))

    def add(self, device: int, results: Sequence[tf.Tensor]) -> None:
        """Has the next action on a device wait for these results as well."""
        if not tf.executing_eagerly():
            last = self._last.get(device, self._first)
            self._last[device] = [*last, *(result.op for result in results)]

    def record(
        self, device: int, results: Sequence[tf.Tensor], *, is_sharded: bool
    ) -> None:
        """Makes an action the last one on a device, if it has any results.

        Args:
            device: The device.
            results: The results.
            is_sharded: True for losses of several operations, on all shards.
        """
        if tf.executing_eagerly() or not results:
            return
        if is_sharded and len(results) > 1:
            # One operation per shard; all of the next action's wait for each of them.
            places: dict[str, list[tf.Operation]] = {}
            for result in results:
                places.setdefault(result.op.device, []).append(result.op)
            self._last[device] = []
            for place, operations in places.items():
                with tf.device(place), tf.control_dependencies(operations):
                    self._last[device].append(tf.no_op())
        else:
            self._last[device] = [results[0].op]


def _sum(parts: Sequence[tf.Tensor], device: str) -> tf.Tensor | None:
    """Returns the sum of gradients, or None of none."""
    if len(parts) > 1:
        return small_functions.run_on(device, _add_n, list(parts))
    return parts[0] if parts else None


def _zeros_like(tensor: tf.Tensor) -> tf.Tensor:
    return tf.zeros_like(tensor)


def _add_n(parts: list[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(parts)


def _sum_losses(losses: list[tf.Tensor]) -> tf.Tensor:
    return tf.reduce_sum(stack_losses(losses))


def _total_loss(losses: list[tf.Tensor], summed: list[tf.Tensor]) -> tf.Tensor:
    """Returns the sum over microbatches, with the added losses that are sums."""
    total = tf.add_n([tf.reduce_sum(loss) for loss in losses])
    for loss in summed:
        total += tf.cast(loss, total.dtype)
    return total


def _loss_weights(
    split: microbatch.Split, m: int, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the weights of a microbatch in means over the rows, and in sums."""
    has_rows = tf.cast(tf.minimum(split.sizes[m], 1), dtype)
    return split.batch_fraction(m, dtype), has_rows


def _weighted_losses(
    losses: tf.Tensor, are_sums: Sequence[bool], split: microbatch.Split, m: int
) -> list[tf.Tensor]:
    """Returns the losses that layers add on a microbatch, weighted."""
    weights = _loss_weights(split, m, losses.dtype)
    each = zip(tf.unstack(losses), are_sums, strict=True)
    return [loss * weights[is_sum] for loss, is_sum in each]


def _weighted_loss_grads(
    grads: list[tf.Tensor],
    are_sums: Sequence[bool],
    split: microbatch.Split,
    m: int,
    dtype: tf.DType,
) -> tf.Tensor:
    """Returns the gradients of the losses that layers add on a microbatch.

    Args:
        grads: Gradients of the losses that are means, and of those that are sums.
        are_sums: For each loss, whether it is a sum over the rows.
        split: The microbatches.
        m: The microbatch.
        dtype: The dtype of the losses.
    """
    weights = _loss_weights(split, m, dtype)
    return tf.stack([tf.cast(grads[i], dtype) * weights[i] for i in are_sums])
