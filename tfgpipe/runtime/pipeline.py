"""A mini-batch through all stages, as operations in the order of a schedule.

Either as one operation with a gradient of its own, whose forward emits the forward
actions and whose gradient the backward ones; or, where the loss is a value that the
last stage makes, all actions in one go. Both ways the order is one that this library
chooses rather than one that automatic differentiation happens to produce.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.capture import Wire
from tfgpipe.devices import device_kind
from tfgpipe.distribution import replica_context
from tfgpipe.runtime import microbatch, snapshot
from tfgpipe.runtime.carry import Change
from tfgpipe.runtime.executor import Result, Step, Tensors, TrainResult
from tfgpipe.runtime.snapshot import Snapshot
from tfgpipe.runtime.timer import Clock
from tfgpipe.schedules import Schedule
from tfgpipe.stage import (
    Mode,
    Remat,
    Stage,
    TracedStage,
    Transfer,
    normalization,
    trace_all,
)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages on devices, and how a mini-batch goes through them.

    Attributes:
        stages: The K stages.
        wanted: Numbers of the values to return.
        shards: For each stage, the devices of its shards in the replica being built.
        schedule: The order of the actions, on the devices numbered as they occur.
        remat: What the backward recomputes.
        jit_compile: For each stage, whether XLA compiles its programs.
        batch_norm: When moving averages of batch statistics move.
        constant: Numbers of inputs whose gradients nobody wants.
        transfer: How values cross from stage to stage.
        clock: What to time the actions with, if at all.
    """

    stages: Sequence[Stage]
    wanted: Sequence[int]
    shards: Sequence[Sequence[str]]
    schedule: Schedule
    remat: Remat
    jit_compile: Sequence[bool]
    batch_norm: normalization.BatchNorm = "microbatch"
    constant: Sequence[int] = ()
    transfer: Transfer = dataclasses.field(default_factory=Transfer)
    clock: Clock | None = None

    @property
    def devices(self) -> list[str]:
        """For each stage, the device of what is not sharded."""
        return [lead for lead, *_ in self.shards]

    def run(self, inputs: Mapping[Wire, tf.Tensor], *, training: bool | None) -> Result:
        """Runs a mini-batch through all stages, differentiably.

        Args:
            inputs: The values that are given and the masks on them, `[B, ...]` each.
            training: Whether layers run as in training; None leaves it to each.

        Raises:
            ValueError: If two stages share a variable that one of them changes.
            RuntimeError: If replicas are to meet one after the other.
        """
        step, before = self._begin(inputs, training=training)
        changes: list[Change] = []
        made: list[Wire] = []

        @tf.custom_gradient
        def run(*tensors: tf.Tensor) -> Any:
            outputs, loss = step.forward(dict(zip(inputs, tensors, strict=False)))
            # Not differentiated, so they need not be results of this function.
            changes.extend(step.changes())
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
            results = run(*inputs.values(), *before.weights())
        outputs = dict(zip(made, results, strict=False))
        loss = results[len(made)] if len(results) > len(made) else None
        return Result({**self._passed(inputs), **outputs}, loss, changes)

    def train(
        self,
        inputs: Mapping[Wire, tf.Tensor],
        *,
        loss: Wire,
        loss_grad: tf.Tensor,
        added_loss_grad: tf.Tensor,
    ) -> TrainResult:
        """Runs a mini-batch through all stages, forward and backward.

        Args:
            inputs: As for `run`.
            loss: The value, `[1]` of each microbatch, whose sum is the loss.
            loss_grad: The gradient of the loss, `[]`.
            added_loss_grad: The gradient of the losses that layers add, `[]`.

        Raises:
            ValueError, RuntimeError: As `run` does.
        """
        step, _ = self._begin(inputs, training=True)
        result = step.train(
            dict(inputs),
            loss=loss,
            loss_grad=loss_grad,
            added_loss_grad=added_loss_grad,
        )
        outputs = {**self._passed(inputs), **result.outputs}
        return dataclasses.replace(result, outputs=outputs)

    def trace(
        self, inputs: Mapping[Wire, tf.Tensor], *, training: bool | None
    ) -> list[TracedStage]:
        """Returns the stages traced for such inputs, as a run does first.

        Raises:
            RuntimeError: If replicas are to meet one after the other.
        """
        return self._trace(inputs, *self._split(inputs, training=training), training)

    def _trace(
        self,
        inputs: Mapping[Wire, tf.Tensor],
        split: microbatch.Split,
        num_replicas: int,
        training: bool | None,
    ) -> list[TracedStage]:
        specs = {
            wire: tf.TensorSpec([split.static_size, *x.shape[1:]], x.dtype)
            for wire, x in inputs.items()
        }
        modes = [
            Mode(
                training=training,
                per_layer=self.remat == "layer",
                may_be_empty=split.may_be_empty,
                jit_compile=jit_compile,
                batch_norm=self.batch_norm,
                num_replicas=num_replicas,
                constant=tuple(self.constant),
                on_cpu=device_kind(device) == "CPU",
                core=device if self._on_tpu else None,
                num_microbatches=len(split.sizes),
            )
            for device, jit_compile in zip(self.devices, self.jit_compile, strict=True)
        ]
        try:
            return trace_all(self.stages, specs, modes)
        except Exception as error:
            if split.static_size is None:
                error.add_note(
                    "In a pipeline layers were called on a microbatch of unknown size: "
                    "the batch size is not known, or num_microbatches does not divide "
                    "it. If a layer works for known sizes alone, use batches of a size "
                    "that num_microbatches divides."
                )
            raise

    def _begin(
        self, inputs: Mapping[Wire, tf.Tensor], *, training: bool | None
    ) -> tuple[Step, Snapshot]:
        """Traces the stages, and reads their variables."""
        split, num_replicas = self._split(inputs, training=training)
        traced = self._trace(inputs, split, num_replicas, training)
        before = snapshot.take(self.stages, traced, self.shards)
        order = self.schedule.first(len(split.sizes))
        step = Step(
            self.stages,
            traced,
            shards=self.shards,
            wanted=self.wanted,
            schedule=order,
            split=split,
            before=before,
            saves=self._saves(order, training=training),
            training=bool(training),
            transfer=self.transfer,
            clock=self.clock,
        )
        return step, before

    def _split(
        self, inputs: Mapping[Wire, tf.Tensor], *, training: bool | None
    ) -> tuple[microbatch.Split, int]:
        """Returns how a mini-batch is cut, and how many replicas meet in training."""
        num_replicas = self._num_replicas() if training else 1
        first = next(iter(inputs.values()))
        if self._on_tpu:
            check_tpu(
                first.shape[0], num_replicas=num_replicas, timed=self.clock is not None
            )
        # Replicas meet at each microbatch, so all have as many of them.
        split = microbatch.split_rows(
            first, self.schedule.num_microbatches, any_size=num_replicas > 1
        )
        return split, num_replicas

    def _passed(self, inputs: Mapping[Wire, tf.Tensor]) -> Tensors:
        """Returns inputs that are wanted as they are, and go through no stage."""
        return {wire: x for wire, x in inputs.items() if wire.number in self.wanted}

    @property
    def _on_tpu(self) -> bool:
        """Whether the step is part of a computation for TPUs."""
        return device_kind(self.devices[-1]) == "TPU"

    def _num_replicas(self) -> int:
        """Returns how many replicas the layers sum over in training; 1 if none does.

        Raises:
            RuntimeError: If replicas run one after the other.
        """
        number = replica_context.current_num_replicas()
        called = (layer for stage in self.stages for layer in stage.layers)
        if number == 1 or not normalization.synchronizes(called):
            return 1
        if tf.executing_eagerly():
            raise RuntimeError(
                "Layers that synchronize sum over replicas that run at the same time; "
                "eagerly they run one after the other. Received an eager call of a "
                f"pipeline on one of {number} replicas. Put `strategy.run(...)` into a "
                "`tf.function`."
            )
        return number

    def _saves(
        self, order: Schedule, *, training: bool | None
    ) -> Callable[[int, int], bool]:
        """Returns whether the activations of a stage and a microbatch are kept."""
        if not training or self.remat in ("stage", "layer"):
            return lambda k, m: False
        if self.remat == "none":
            return lambda k, m: True
        last = order.num_microbatches - 1
        return lambda k, m: m == last or order.follows_at_once(k, m)


def check_tpu(
    num_rows: int | None, *, num_replicas: int = 1, timed: bool = False
) -> None:
    """Raises ValueError for what a computation for TPUs cannot hold.

    Args:
        num_rows: Rows of the mini-batch, if they are known.
        num_replicas: How many replicas layers sum over.
        timed: Whether actions are to be timed.
    """
    if num_rows is None:
        raise ValueError(
            "On TPUs the number of rows of a mini-batch must be known, since XLA "
            "compiles for known shapes. Received a mini-batch of any number. Use "
            "`dataset.batch(size, drop_remainder=True)`."
        )
    if num_replicas > 1:
        raise ValueError(
            "On TPUs layers in a pipeline cannot sum over replicas. Received "
            f"`synchronized=True` in training on {num_replicas} replicas. Leave it "
            'out, and try `batch_norm="deferred"`.'
        )
    if timed:
        raise ValueError(
            "On TPUs single actions cannot be timed, since XLA compiles a step as a "
            "whole. Received a TimelineCallback. Use `tf.profiler` instead."
        )
