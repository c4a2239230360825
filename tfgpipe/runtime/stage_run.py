"""One stage in one step: the tensors that it holds, the functions that it runs."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.devices import host_device
from tfgpipe.runtime.state import Carry
from tfgpipe.runtime.step import Step
from tfgpipe.schedules import Action, ActionKind
from tfgpipe.stage import NamedTensors, StageFunction, StageFunctions


class StageRun:
    """One stage in one step.

    Args:
        step: The step.
        k: The stage.

    Attributes:
        saved: For each microbatch in flight, tensors by name: those that its backward
            reads, and more.
        gradients: The accumulators of weight gradients; after the step, the gradients
            of the weights that have one.
        sliced: The weights that are in slices on replicas, by name.
        gathered: Weights that the schedule gathers, by name, as the next pass reads
            them.
        waiting: By action, weights that it has gathered for a later pass.
    """

    def __init__(self, step: Step, k: int) -> None:
        self.traced = step.traced[k]
        self.trace = self.traced.trace
        self.variables = tuple(step.variables[k])
        self.devices = tuple(step.devices[k])
        self.carry = Carry(
            self.variables, self.traced, self.device, step.split, step.initial_state
        )
        self.saved: dict[int, NamedTensors] = {}
        self._schedule, self._remat = step.schedule, step.remats[k]
        num_microbatches = step.schedule.num_microbatches
        self._keeps = [step.keeps(k, m) for m in range(num_microbatches)]
        self._split = step.split
        self.gradients: list[tf.Tensor] = []
        self.gathered: NamedTensors = {}
        self.waiting: dict[Action, NamedTensors] = {}
        self._k, self._per_step = k, step.per_step
        names = self.trace.given.variables
        self.sliced = {
            name: variable
            for name, variable in zip(names, self.variables, strict=True)
            if keras_internals.variables.is_sliced(variable)
        }
        self._places = step.initial_state.devices
        # Of tensors that are on the host: the devices that they came from.
        self._homes: dict[str, str] = {}

    @property
    def device(self) -> str:
        """The primary device."""
        return self.devices[0]

    def recomputes(self, m: int) -> bool:
        """Returns whether the backward of a microbatch computes forwards again."""
        return any(self._remat.recomputed(1, kept=self._keeps[m]))

    def gather(self) -> list[tf.Tensor]:
        """Returns the weights that are in slices, gathered now."""
        gathered = []
        for variable in self.sliced.values():
            with tf.device(self._places[variable]):
                gathered.append(tf.identity(variable.value))
        return gathered

    def take_gathered(self, actions: Iterable[Action]) -> None:
        """Has passes from here on read what one of these actions has gathered."""
        for action in actions:
            if action in self.waiting:
                self.gathered = self.waiting.pop(action)
                self.carry.forget_hoisted()

    def begin_backward(self) -> None:
        """Makes the accumulators of weight gradients, which are zero."""
        self.gradients = self._functions(0).accumulation.begin(self.devices)

    def run_host_part(self, m: int, values: NamedTensors) -> NamedTensors:
        """Returns the tensors that the host makes of a stage's inputs for a GPU."""
        function = self._functions(m).host
        if function is None:
            return {}
        host = host_device(self.device)
        with tf.device(host):
            made, _ = function(
                values, (), *self._sizes(m), devices=[host for _ in self.devices]
            )
        return made

    def read_later(self, m: int) -> list[str]:
        """Returns the names of a microbatch's tensors that are worth moving away.

        Integers and scalars are seeds, lengths and the like.
        """
        backward = [x.kind for x in self._schedule.backward(self._k, m)]
        names = self._functions(m).read_later(backward)
        # Inputs of the whole step are given once, whichever microbatches wait.
        pairs = zip(self.traced.input_keys, self.trace.given.inputs, strict=True)
        once = {name for key, name in pairs if key.value_id in self._per_step}
        return [
            name
            for name in names
            if name not in once
            and (spec := self.trace.spec(name)).shape.rank != 0
            and spec.dtype not in (tf.int32, tf.variant, tf.resource)
        ]

    def home(self, name: str, tensor: tf.Tensor) -> str:
        """Returns the device that a tensor of a microbatch is on when it is used."""
        is_here = tensor.device in self.devices
        return self._homes.setdefault(name, tensor.device if is_here else self.device)

    def feeds(self, kind: ActionKind, m: int, values: NamedTensors) -> NamedTensors:
        """Returns those of a microbatch's values that the function of a kind takes."""
        function = self._functions(m).of(kind)
        there = self._with_hoisted(function, m, values)
        return {name: there[name] for name in function.feeds}

    def run(
        self, action: Action, feeds: NamedTensors
    ) -> tuple[NamedTensors, list[tf.Tensor]]:
        """Runs the function of an action.

        Returns:
            The function's outputs by name, and the updated accumulators if it adds to
            them; after the stage's last backward, the final gradients.
        """
        m, adds = action.microbatch, action.kind.adds_gradients
        functions = self._functions(m)
        made, sums = functions.of(action.kind)(
            feeds, self.gradients if adds else (), *self._sizes(m), devices=self.devices
        )
        if not adds:
            return made, []
        self.gradients = sums
        is_last = self._schedule.is_last_gradient(action)
        if is_last and self.gradients and not functions.accumulation.is_final:
            finalize = functions.finalize
            values = self._with_hoisted(finalize, m, self.saved[m])
            _, self.gradients = finalize(values, self.gradients, devices=self.devices)
        return made, self.gradients

    def _sizes(self, m: int) -> list[tf.Tensor]:
        """Returns the number of examples of a microbatch if that may be zero."""
        return [self._split.sizes[m]] if self._split.may_be_empty else []

    def _with_hoisted(
        self, function: StageFunction, m: int, values: NamedTensors
    ) -> NamedTensors:
        """Returns values, and the hoisted ones that a function takes."""
        hoisted = self.carry.hoisted
        there = {**values, **self.gathered, **hoisted}
        hoisted.update(self._functions(m).hoisted(function, there, self.devices))
        return {**there, **hoisted}

    def _functions(self, m: int) -> StageFunctions:
        if self._keeps[m]:
            return self.traced.without_remat
        return self.traced.saving(self._remat)
