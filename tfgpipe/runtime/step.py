"""A step before it runs: traced stages, the variables' values, schedule and split."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from tfgpipe.capture import TensorKey
from tfgpipe.remat import Remat
from tfgpipe.runtime import microbatch
from tfgpipe.runtime.state import InitialState
from tfgpipe.schedules import Schedule
from tfgpipe.stage import Boundary, TracedStage

# A step of fewer operations is small: calls of functions take much of its time. Results
# differ by rounding, so processes that are compared have to agree.
FEW_OPERATIONS = int(os.environ.get("TFGPIPE_FEW_OPERATIONS", 2**12))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step that has not run yet. It may run several times, with equal results.

    Attributes:
        traced: The K stages, traced.
        variables: For each stage its variables, the trainable ones first, as it was
            traced: a user may change `trainable` before the gradient is taken.
        devices: For each stage the devices of its shards, the primary one first.
        initial_state: The variables before the step.
        schedule: The order of the actions.
        split: The sizes of the microbatches.
        output_ids: Ids of the values to return.
        per_step: Ids of inputs that are given whole to every microbatch.
        are_sums: For each stage and each loss that it adds, whether the loss is a sum
            over the examples.
        boundary: The encoding of values between stages.
        remats: For each stage its rematerialisation policy.
        start_dependency: Operation that the first action of each device comes after, or
            None.
    """

    traced: Sequence[TracedStage]
    variables: Sequence[Sequence[keras.Variable]]
    devices: Sequence[Sequence[str]]
    initial_state: InitialState
    schedule: Schedule
    split: microbatch.Split
    output_ids: frozenset[int]
    per_step: frozenset[int]
    are_sums: Sequence[Sequence[bool]]
    boundary: Boundary
    remats: Sequence[Remat]
    start_dependency: tf.Operation | None

    @property
    def weights(self) -> list[tf.Tensor]:
        """The values of the weights before the step."""
        state = self.initial_state
        return [state.values[variable] for variable in state.trainable]

    @functools.cached_property
    def is_small(self) -> bool:
        """True if calls of functions take much of its time."""
        operations = sum(len(stage.trace.edges) for stage in self.traced)
        return operations * len(self.split.sizes) < FEW_OPERATIONS

    @property
    def has_side_effects(self) -> bool:
        """True if a second run would not do the same."""
        return any(stage.trace.forward.side_effects for stage in self.traced)

    def keeps(self, k: int, m: int) -> bool:
        """Returns whether a forward saves what the backward reads."""
        training = self.traced[k].options.training
        return bool(training) and self.remats[k].keeps(self.schedule, k, m)

    def passed_through(
        self, inputs: Mapping[TensorKey, tf.Tensor]
    ) -> dict[TensorKey, tf.Tensor]:
        """Returns inputs that are outputs as well, and pass through no stage."""
        return {key: x for key, x in inputs.items() if key.value_id in self.output_ids}

    @functools.cached_property
    def producers(self) -> dict[TensorKey, int]:
        """The stage that produces each value."""
        return {key: k for k, t in enumerate(self.traced) for key in t.output_keys}

    @functools.cached_property
    def first_consumers(self) -> dict[TensorKey, int]:
        """The first stage that reads each value."""
        stages = reversed(list(enumerate(self.traced)))
        return {key: k for k, stage in stages for key in stage.input_keys}

    @functools.cached_property
    def encoded(self) -> dict[TensorKey, int]:
        """The values that are encoded between stages, with the producer of each."""
        return {
            key: k
            for k, stage in enumerate(self.traced)
            for key, spec in stage.output_specs.items()
            if key in self.first_consumers
            and self.boundary.compresses(key.value_id, spec)
        }

    @functools.cached_property
    def returned(self) -> dict[TensorKey, int]:
        """The outputs to return, with the producer of each.

        A mask that a later stage removed is removed from the output as well.
        """
        dropped = {
            TensorKey(n, is_mask=True) for t in self.traced for n in t.dropped_masks
        }
        return {
            key: k
            for key, k in self.producers.items()
            if key.value_id in self.output_ids and key not in dropped
        }
