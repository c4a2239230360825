"""One stage in one step: what it holds, and the functions that it runs."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfgpipe.devices import host_device
from tfgpipe.runtime import microbatch
from tfgpipe.runtime.state import Carry
from tfgpipe.schedules import ActionKind
from tfgpipe.stage import NamedTensors, StageFunction, StageFunctions, TracedStage


class StageRun:
    """One stage in one step.

    Args:
        traced: The stage.
        weights: Its trainable variables as it was traced; what is trainable may change
            before the gradient is taken.
        devices: Devices of its shards, the primary one first.
        carry: The state that is carried from microbatch to microbatch.
        split: The division of the mini-batch into microbatches.
        keeps: For each microbatch, whether its activations are kept for its backward.

    Attributes:
        saved: For each microbatch, tensors by name: what its backward needs, and more.
    """

    def __init__(
        self,
        traced: TracedStage,
        weights: Sequence[keras.Variable],
        devices: Sequence[str],
        carry: Carry,
        split: microbatch.Split,
        keeps: Sequence[bool],
    ) -> None:
        self.traced = traced
        self.trace = traced.trace
        self.weights = tuple(weights)
        self.devices = tuple(devices)
        self.carry = carry
        self.keeps = keeps
        self.saved: dict[int, NamedTensors] = {}
        self._split = split
        self._sums: list[tf.Tensor] = []
        self._num_pending = 0

    @property
    def device(self) -> str:
        """The primary device."""
        return self.devices[0]

    def recomputes(self, m: int) -> bool:
        """Returns whether the backward of a microbatch computes forwards again."""
        return any(self.traced.options.remat.recomputed(1, kept=self.keeps[m]))

    def begin_backward(self) -> None:
        """Makes the accumulators of weight gradients, which are zero."""
        self._num_pending = len(self._split.sizes)
        self._sums = self._functions(0).accumulation.begin(self.devices)

    def made_on_host(self, m: int, values: NamedTensors) -> NamedTensors:
        """Computes the host's part of a microbatch for a GPU, before its forward.

        Args:
            m: The microbatch.
            values: The inputs of the stage, by name.
        """
        function = self._functions(m).host
        if function is None:
            return {}
        host = host_device(self.device)
        with tf.device(host):
            made, _ = function(
                values, (), *self._rows(m), devices=[host for _ in self.devices]
            )
        return made

    def feeds(self, kind: ActionKind, m: int, values: NamedTensors) -> NamedTensors:
        """Returns the inputs of an action's function.

        Args:
            kind: Kind of the action.
            m: The microbatch.
            values: All its values.
        """
        function = self._function(kind, m)
        there = self._with_hoisted(function, m, values)
        return {name: there[name] for name in function.feeds}

    def run(
        self, kind: ActionKind, m: int, feeds: NamedTensors
    ) -> tuple[NamedTensors, list[tf.Tensor]]:
        """Runs the function of an action.

        Args:
            kind: Kind of the action.
            m: The microbatch.
            feeds: Its inputs.

        Returns:
            What it makes by name, and the accumulators if it adds to them. After the
            last backward these are the gradients.
        """
        adds = kind.adds_gradients
        made, sums = self._function(kind, m)(
            feeds, self._sums if adds else (), *self._rows(m), devices=self.devices
        )
        if not adds:
            return made, []
        self._sums = sums
        self._num_pending -= 1
        if not self._num_pending and not self._functions(m).accumulation.is_final:
            self._finalize(m)
        return made, self._sums

    def _rows(self, m: int) -> list[tf.Tensor]:
        """Returns the number of rows of a microbatch if that may be zero."""
        return [self._split.sizes[m]] if self._split.may_be_empty else []

    def _finalize(self, m: int) -> None:
        """Makes gradients of the accumulators, after the last backward."""
        function = self._functions(m).finalize
        values = self._with_hoisted(function, m, self.saved[m])
        if self._sums:
            _, self._sums = function(values, self._sums, devices=self.devices)

    def weight_gradients(self) -> list[tf.Tensor]:
        """Returns the gradients of the weights that have one, after the step."""
        return self._sums

    def _with_hoisted(
        self, function: StageFunction, m: int, values: NamedTensors
    ) -> NamedTensors:
        """Returns values, and what a function takes of those that are hoisted."""
        hoisted = self.carry.hoisted
        there = {**values, **hoisted}
        hoisted.update(self._functions(m).hoisted(function, there, self.devices))
        return {**values, **hoisted}

    def _function(self, kind: ActionKind, m: int) -> StageFunction:
        return self._functions(m).of(kind)

    def _functions(self, m: int) -> StageFunctions:
        return self.traced.without_remat if self.keeps[m] else self.traced.with_remat
