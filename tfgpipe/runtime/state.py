"""State of a step: variables before it, the carry of microbatches, variables after it.

A variable is read once, before the step. From then on its value goes from the forward
of one microbatch into that of the next, as the *carry* of a scan does, and what comes
out of the last is what it becomes:

    InitialState ─▶ Carry: F0 ─▶ F1 ─▶ ... ─▶ F(M-1) ─▶ VariableUpdate

So recomputations see what the forward saw, and nothing is assigned before the step is
through.

Replicas have equal seeds, and would draw equal dropout masks for different rows. So
each starts a step from seeds of its own: the stored ones plus an offset, which is
subtracted when the step ends.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, unique
from tfgpipe.devices import ordering_token, small_functions
from tfgpipe.distribution import current_strategy, seed_offset
from tfgpipe.graph import joint_graph
from tfgpipe.runtime import microbatch
from tfgpipe.stage import NamedTensors, Stage, TracedStage


@dataclasses.dataclass(frozen=True)
class InitialState:
    """The variables of a pipeline as they were before a step.

    Attributes:
        values: Their values.
        devices: The device of each: that of the first stage that uses it.
        trainable: The variables that are weights.
        seed_offsets: Numbers that were added to seeds, for the replica to have its own.
    """

    values: IdentityMap[keras.Variable, tf.Tensor]
    devices: IdentityMap[keras.Variable, str]
    trainable: tuple[keras.Variable, ...]
    seed_offsets: IdentityMap[keras.Variable, tf.Tensor]


class VariableUpdate(NamedTuple):
    """The new value of a variable after a step.

    Attributes:
        variable: The variable.
        value: Its value after the last microbatch.
        once_per_step: True for one update per step, by or for all microbatches
            together, rather than one by each microbatch.
    """

    variable: keras.Variable
    value: tf.Tensor
    once_per_step: bool


def read_variables(
    stages: Sequence[Stage],
    traced: Sequence[TracedStage],
    devices: Sequence[Sequence[str]],
) -> InitialState:
    """Reads every variable, on the device of the first stage that uses it.

    Args:
        stages: The K stages.
        traced: The same, traced.
        devices: For each stage, the devices of its shards.

    Raises:
        ValueError: If two stages share a variable that one of them changes.
    """
    users: IdentityMap[keras.Variable, list[int]] = IdentityMap()
    trainable = unique(variable for stage in stages for variable in stage.weights)
    state = InitialState(IdentityMap(), IdentityMap(), tuple(trainable), IdentityMap())
    replica = current_strategy().replica_index
    layers = [layer for stage in stages for layer in stage.layers]
    if isinstance(replica, int) and replica == 0:
        layers = []  # Its seeds are those that there are.
    seeds = IdentityMap(
        (s, x) for x in layers for s in keras_internals.layers.seed_states(x)
    )
    for k, stage in enumerate(stages):
        shards = stage.shard_indices
        for variable in stage.variables:
            users.setdefault(variable, []).append(k)
            if variable in state.values:
                continue
            state.devices[variable] = devices[k][shards.get(variable, 0)]
            with tf.device(state.devices[variable]):
                value = tf.identity(variable.value)
            if variable in seeds:
                device = state.devices[variable]
                offset = small_functions.run_on(
                    device, seed_offset, replica, value.dtype
                )
                state.seed_offsets[variable] = offset
                value = small_functions.run_on(device, tf.add, value, offset)
            state.values[variable] = value
    for k, stage in enumerate(stages):
        for variable in traced[k].changed(stage.variables):
            if len(users[variable]) > 1:
                raise ValueError(
                    "Stages can share weights, but not what a step changes, since each "
                    "stage would advance it from the same value. Received "
                    f"'{variable.path}' in stages {users[variable]}. Use a layer "
                    "of its own in each, or a `balance` that keeps them together."
                )
    return state


class Carry:
    """The state that one stage hands from microbatch to microbatch.

    Args:
        variables: The stage's variables, as it was traced.
        traced: The stage, traced.
        device: The stage's primary device.
        split: The sizes of the microbatches.
        initial_state: The variables before the step.

    Attributes:
        hoisted: Loop-invariant tensors, by name, as far as they have been computed.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        traced: TracedStage,
        device: str,
        split: microbatch.Split,
        initial_state: InitialState,
    ) -> None:
        self._variables = variables
        self._traced = traced
        self._device = device
        self._split = split
        self._initial_state = initial_state
        self.hoisted: NamedTensors = {}
        trace = traced.trace
        values = (initial_state.values[variable] for variable in variables)
        self._values = dict(zip(trace.given.variables, values, strict=True))
        for name in trace.accumulators:
            self._values[name] = small_functions.run_on(
                device, joint_graph.zero_buffer, trace.spec(name)
            )
        with tf.device(device):
            # Orders the stage's sums over replicas.
            self._token = ordering_token("replicas") if trace.num_collectives else None

    def values(self, m: int) -> NamedTensors:
        """Returns the tensors that a microbatch takes beside its inputs."""
        return {**self._values, **self._collective_inputs(m)}

    def advance(self, made: Mapping[str, tf.Tensor]) -> None:
        """Hands the state after the forward of a microbatch to the next one."""
        trace = self._traced.trace
        for before, after in zip(trace.carry, trace.new_carry, strict=True):
            if after in made and before not in trace.per_step_updates:
                self._values[before] = made[after]

    def forget_hoisted(self) -> None:
        """Has hoisted tensors computed again, of weights as they are read from now.

        Those that are new values of variables stay.
        """
        trace = self._traced.trace
        stays = {trace.assigned[name] for name in trace.per_step_updates}
        self.hoisted = {n: x for n, x in self.hoisted.items() if n in stays}

    def updates(self) -> list[VariableUpdate]:
        """Returns the new values of the stage's variables."""
        trace = self._traced.trace
        names = zip(self._variables, trace.assigned.items(), strict=True)
        once = trace.per_step_updates
        return [
            VariableUpdate(variable, self.hoisted[after], once_per_step=True)
            if before in once
            else VariableUpdate(
                variable,
                self._without_offset(variable, self._values[before]),
                once_per_step=False,
            )
            for variable, (before, after) in names
            if before != after
        ]

    def accumulate(self, latest: IdentityMap[keras.Variable, tf.Tensor]) -> None:
        """Moves variables by the values that the stage's layers have accumulated.

        Args:
            latest: Values of variables so far. Several calls of a layer may move one,
                one after the other.
        """
        for accumulation in self._traced.trace.accumulated:
            accumulator = accumulation.accumulator
            variables = accumulator.variables
            before = [latest.get(v, self._initial_state.values[v]) for v in variables]
            after = small_functions.run_on(
                self._initial_state.devices[variables[0]],
                functools.partial(accumulator.update),  # A method would be kept.
                [self._values[name] for name in accumulation.values],
                before,
            )
            latest.update(zip(variables, after, strict=True))

    def _without_offset(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        """Removes the replica's offset from a seed; returns other values unchanged."""
        offset = self._initial_state.seed_offsets.get(variable)
        if offset is None:
            return value
        return small_functions.run_on(
            self._initial_state.devices[variable], tf.subtract, value, offset
        )

    def _collective_inputs(self, m: int) -> NamedTensors:
        """Returns the inputs of a stage's collectives on a microbatch, if any."""
        trace, rows = self._traced.trace, self._split.sizes[m]
        if not trace.num_collectives:
            return {}
        with tf.device(self._device):
            zero = tf.minimum(rows, 0)  # A constant would be compiled in.
            parts = (
                self._token,
                zero + self._group_key(),
                zero + m * trace.num_collectives,
                tf.cast(rows > 0, tf.float32),
            )
        return dict(zip(trace.given.replicas, parts, strict=True))

    def _group_key(self) -> int:
        """Returns the key of the group in which the stage sums over its replicas."""
        trace = self._traced.trace
        specs = map(trace.spec, trace.given.variables)
        return current_strategy().stage_group_key(
            self._traced.group_key, self._device, trace.num_collectives, specs
        )


def variable_updates(carries: Sequence[Carry]) -> list[VariableUpdate]:
    """Returns the new values of variables, once all forwards have been emitted."""
    updates = [update for carry in carries for update in carry.updates()]
    latest: IdentityMap[keras.Variable, tf.Tensor] = IdentityMap()
    for carry in carries:
        carry.accumulate(latest)
    return [
        *updates,
        *(VariableUpdate(v, x, once_per_step=True) for v, x in latest.items()),
    ]
