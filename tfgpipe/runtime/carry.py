"""What stages carry from one microbatch to the next: statistics, seeds, sums.

A variable is read once, before the step. From then on its value goes from the forward
program of one microbatch into that of the next, and what comes out of the last is what
it becomes. So recomputations see what the forward saw, and nothing is assigned before
the step is through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfgpipe.devices import ordering_token
from tfgpipe.distribution import processes
from tfgpipe.runtime import microbatch
from tfgpipe.runtime.snapshot import Snapshot
from tfgpipe.stage import Stage, TracedStage, Values, nothing_gathered


class Change(NamedTuple):
    """What a step makes of a variable.

    Attributes:
        variable: The variable.
        value: Its value after the last microbatch.
        once: Whether it moves once a step, by all microbatches together, rather than
            with each.
    """

    variable: keras.Variable
    value: tf.Tensor
    once: bool


class Carried:
    """The values of all variables in the course of a step.

    Args:
        stages: The K stages.
        traced: The same, traced.
        devices: For each stage, its device.
        split: How the mini-batch is cut.
        before: The variables as they are before the step.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        traced: Sequence[TracedStage],
        *,
        devices: Sequence[str],
        split: microbatch.Split,
        before: Snapshot,
    ) -> None:
        self._stages = stages
        self._traced = traced
        self._devices = devices
        self._split = split
        self._before = before
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
        for k, device in enumerate(devices):
            with tf.device(device):
                gathered = nothing_gathered(traced[k].trace)
                token = (
                    ordering_token("replicas") if traced[k].trace.num_meetings else None
                )
            self._variables[k].update(gathered)
            self._tokens.append(token)

    def values(self, k: int, m: int) -> Values:
        """Returns what a stage's program takes for a microbatch beside its inputs."""
        return {**self._variables[k], **self._meeting(k, m)}

    def advance(self, k: int, made: Mapping[str, tf.Tensor]) -> None:
        """Hands what a forward program made to the next microbatch."""
        trace = self._traced[k].trace
        for before, after in zip(trace.carried, trace.new_carried, strict=True):
            if after in made:
                self._variables[k][before] = made[after]

    def changes(self) -> list[Change]:
        """Returns what the forward actions have made of variables."""
        changed = [
            Change(variable, self._unshifted(variable, values[before]), once=False)
            for stage, traced, values in zip(
                self._stages, self._traced, self._variables, strict=True
            )
            for variable, before, after in zip(
                stage.state, traced.trace.state, traced.trace.new_state, strict=True
            )
            if before != after
        ]
        return [*changed, *self._updated()]

    def _unshifted(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        """Returns a seed as it is on all replicas; what is no seed as it is."""
        shift = self._before.shifts.get(id(variable))
        return value if shift is None else value - shift

    def _updated(self) -> list[Change]:
        """Returns what becomes of variables that move by what was gathered."""
        moved: dict[int, keras.Variable] = {}
        latest = dict(self._before.values)
        for traced, values in zip(self._traced, self._variables, strict=True):
            trace = traced.trace
            for statistic, names in zip(trace.statistics, trace.gathered, strict=True):
                keys = [id(variable) for variable in statistic.variables]
                with tf.device(self._before.devices[keys[0]]):
                    after = statistic.update(
                        [values[name] for name in names], [latest[key] for key in keys]
                    )
                # Several calls may move a variable, one after the other.
                latest.update(zip(keys, after, strict=True))
                moved.update(zip(keys, statistic.variables, strict=True))
        return [Change(v, latest[key], once=True) for key, v in moved.items()]

    def _meeting(self, k: int, m: int) -> Values:
        """Returns how a stage meets its replicas on a microbatch, if it does."""
        trace, rows = self._traced[k].trace, self._split.sizes[m]
        if not trace.num_meetings:
            return {}
        with tf.device(self._devices[k]):
            zero = tf.minimum(rows, 0)  # A constant would be compiled in.
            parts = (
                self._tokens[k],
                zero + self._group(k),
                zero + m * trace.num_meetings,
                tf.cast(rows > 0, tf.float32),
            )
        return dict(zip(trace.replicas, parts, strict=True))

    def _group(self, k: int) -> int:
        """Returns the group key under which a stage sums over its replicas."""
        if not processes.are_replicas(tf.distribute.get_strategy()):
            return self._traced[k].group
        trace = self._traced[k].trace
        variables = map(trace.spec, (*trace.weights, *trace.state))
        return processes.stage_group(self._devices[k], trace.num_meetings, variables)
