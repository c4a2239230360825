"""A mini-batch through all stages, as one operation with a gradient of its own.

Its forward emits the forward actions of a `step`, its gradient the backward actions, so
both passes run in an order that this library chooses rather than one that automatic
differentiation happens to produce.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import microbatch, snapshot
from tfgpipe.layers import BatchNorm, synchronizes
from tfgpipe.replay import Wire
from tfgpipe.stage import Mode, Remat, Stage, TracedStage, trace_all
from tfgpipe.step import Step, Tensors
from tfgpipe.strategy import current_num_replicas


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

    def run(self, inputs: Mapping[Wire, tf.Tensor], *, training: bool | None) -> Result:
        """Runs a mini-batch through all stages, differentiably.

        Args:
            inputs: The values that are given and the masks on them, `[B, ...]` each.
            training: Whether layers run as in training; None leaves it to each.

        Raises:
            ValueError: If two stages share a variable that one of them changes.
            RuntimeError: If replicas are to meet one after the other.
        """
        num_replicas = self._num_replicas() if training else 1
        first = next(iter(inputs.values()))
        # Replicas meet at each microbatch, so all have as many of them.
        split = microbatch.split_rows(
            first, self.num_microbatches, any_size=num_replicas > 1
        )
        traced = self._trace(inputs, split, num_replicas, training=training)
        before = snapshot.take(self.stages, traced, self.devices)
        step = Step(
            self.stages,
            traced,
            devices=self.devices,
            wanted=self.wanted,
            split=split,
            before=before,
            saves=self._saves(training),
        )
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
            results = run(*inputs.values(), *before.weights())
        outputs = dict(zip(made, results, strict=False))
        loss = results[len(made)] if len(results) > len(made) else None
        # An input that is wanted as it is goes through no stage.
        passed = {wire: x for wire, x in inputs.items() if wire.number in self.wanted}
        return Result({**passed, **outputs}, loss, changed)

    def _num_replicas(self) -> int:
        """Returns how many replicas the layers sum over in training; 1 if none does.

        Raises:
            RuntimeError: If replicas run one after the other.
        """
        number = current_num_replicas()
        called = (layer for stage in self.stages for layer in stage.layers)
        if number == 1 or not synchronizes(called):
            return 1
        if tf.executing_eagerly():
            raise RuntimeError(
                "Layers that synchronize sum over replicas that run at the same time; "
                "eagerly they run one after the other. Received an eager call of a "
                f"pipeline on one of {number} replicas. Put `strategy.run(...)` into a "
                "`tf.function`."
            )
        return number

    def _trace(
        self,
        inputs: Mapping[Wire, tf.Tensor],
        split: microbatch.Split,
        num_replicas: int,
        *,
        training: bool | None,
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
                num_replicas=num_replicas,
            )
            for jit_compile in self.jit_compile
        ]
        return trace_all(self.stages, specs, modes)

    def _saves(self, training: bool | None) -> Sequence[bool]:
        """Returns for each microbatch whether its activations are kept."""
        last = self.num_microbatches - 1
        if not training or self.remat in ("stage", "layer"):
            return [False] * self.num_microbatches
        if self.remat == "none":
            return [True] * self.num_microbatches
        return [m == last for m in range(self.num_microbatches)]
