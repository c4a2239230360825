"""The loop of an SPMD pipeline: M + K - 1 ticks, and as many for the gradient.

On TPUs all cores run one program. So K alike stages are one function of a row of
stacked weights, `[K, ...]`, and a microbatch moves on by moving to the next row of a
stacked buffer (GSPMD, Xu et al. 2021, section 3.3). Row k of all of these is on core k:

    tick       0   1   2   3   4   5                buffer, from tick to tick
             ┌───────────────────────┐
    stage 0  │ 0   1   2   3   ·   · │        microbatch t ──▶ row 0 ─ stage 0 ─┐
    stage 1  │ ·   0   1   2   3   · │                    ┌──▶ row 1 ─ stage 1 ─│─┐
    stage 2  │ ·   ·   0   1   2   3 │                    │ ┌▶ row 2 ─ stage 2 ─│─│▶ out
             └───────────────────────┘                    │ └───────────────────│─┘
              microbatch m = t - k                        └─────────────────────┘

Moving the rows is all that cores exchange in a tick: a collective-permute of one
microbatch's boundary tensor. In the K - 1 ticks at each end some rows hold no
microbatch (·). They are computed nevertheless, since all cores run the same program,
and what they give is dropped.

The gradient is a loop of its own in the reverse order, and not automatic
differentiation of this one. It recomputes each stage from the outputs of the tick
before, which are all that the forward keeps: `[M + K - 1, K, B/M, ...]`, of which a
core has a K-th.

    tick t of the gradient    inputs of row k       outputs of row k - 1 at tick t - 1
                              gradient of its       gradient of the inputs of row k + 1,
                              outputs               from tick t + 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfgpipe._compat import custom_gradients
from tfgpipe.spmd.partitioning import Partitioning

# (inputs, weights, constants, state) -> (outputs, state after).
StageFunction = Callable[
    [tf.Tensor, Sequence[tf.Tensor], Sequence[tf.Tensor], Sequence[tf.Tensor]],
    tuple[tf.Tensor, list[tf.Tensor]],
]


@dataclasses.dataclass(frozen=True)
class StackedValues:
    """The variables of all stages, each `[K, ...]`.

    Attributes:
        weights: The variables that have gradients.
        constants: The variables that nothing changes, as of frozen layers.
        state: The variables that a microbatch changes, as seeds and statistics.
    """

    weights: Sequence[tf.Tensor]
    constants: Sequence[tf.Tensor]
    state: Sequence[tf.Tensor]


def run(
    stage: StageFunction,
    inputs: tf.Tensor,
    values: StackedValues,
    *,
    partitioning: Partitioning,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Returns the last stage's outputs, `[M, ...]`, and the state after all ticks.

    Differentiable once, with respect to inputs and weights.

    Args:
        stage: The function of a stage, with outputs of the shapes of its inputs.
        inputs: The microbatches, `[M, ...]`.
        values: The variables.
        partitioning: The placement of the rows.
    """
    state_after: list[tf.Tensor] = []

    @custom_gradients.custom_gradient
    def differentiable(inputs: tf.Tensor, *weights: tf.Tensor) -> tuple:
        given = dataclasses.replace(values, weights=weights)
        ticks = _Ticks(stage, inputs, given, partitioning)
        forward = ticks.forward()
        # Not differentiated, so it need not be a result of this function.
        state_after.extend(forward.state)

        def gradient(output_grads: tf.Tensor) -> list[tf.Tensor]:
            return ticks.backward(forward, output_grads)

        return forward.outputs[ticks.num_stages - 1 :, -1], gradient

    return differentiable(inputs, *values.weights), state_after


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The result of the forward loop.

    Attributes:
        outputs: Outputs of each row at each tick, `[T, K, ...]`.
        states: The state before each tick, `[T, K, ...]` each.
        state: The state after the last.
    """

    outputs: tf.Tensor
    states: list[tf.Tensor]
    state: list[tf.Tensor]


class _Ticks:
    """The two loops over one mini-batch."""

    def __init__(
        self,
        stage: StageFunction,
        inputs: tf.Tensor,
        values: StackedValues,
        partitioning: Partitioning,
    ) -> None:
        self._stage = stage
        self._partitioning = partitioning
        self._inputs = partitioning.replicate(inputs)
        self._values = values
        self.num_stages = partitioning.num_rows
        self._num_microbatches = inputs.shape[0]
        self._num_ticks = self._num_microbatches + self.num_stages - 1
        self._rows = tf.range(self.num_stages)

    def forward(self) -> _Forward:
        """Runs all ticks, from the first to the last."""
        values = self._values

        def tick(
            t: tf.Tensor,
            outputs: tf.Tensor,
            kept: tf.TensorArray,
            state: list[tf.Tensor],
            states: list[tf.TensorArray],
        ) -> tuple:
            states = [x.write(t, s) for x, s in zip(states, state, strict=True)]
            outputs, *state = self._partitioning.map_rows(
                self._forward_row,
                self._stage_inputs(t, outputs),
                self._valid_mask(t),
                *values.weights,
                *values.constants,
                *state,
            )
            return t + 1, outputs, kept.write(t, outputs), state, states

        _, _, kept, state, states = self._loop(
            tick,
            self._buffer(),
            self._per_tick(self._buffer()),
            list(values.state),
            [self._per_tick(s) for s in values.state],
        )
        return _Forward(self._stacked(kept), [self._stacked(s) for s in states], state)

    def backward(self, forward: _Forward, output_grads: tf.Tensor) -> list[tf.Tensor]:
        """Runs all ticks in reverse; returns gradients of the inputs and the weights.

        The gradients of the last stage's outputs are `[M, ...]`.
        """
        values, K = self._values, self.num_stages
        output_grads = self._partitioning.replicate(output_grads)

        def tick(
            i: tf.Tensor,
            input_grads: tf.Tensor,
            kept: tf.TensorArray,
            sums: list[tf.Tensor],
        ) -> tuple:
            t = self._num_ticks - 1 - i
            before = forward.outputs[tf.maximum(t - 1, 0)]
            input_grads, *weight_grads = self._partitioning.map_rows(
                self._backward_row,
                self._stage_inputs(t, before),
                self._valid_mask(t),
                self._select_row(
                    K - 1,
                    output_grads[tf.maximum(t - (K - 1), 0)],
                    _shift(input_grads, -1),
                ),
                *values.weights,
                *values.constants,
                *(states[t] for states in forward.states),
            )
            sums = [a + b for a, b in zip(sums, weight_grads, strict=True)]
            return i + 1, input_grads, kept.write(t, input_grads), sums

        zeros = [self._partitioning.split(tf.zeros_like(w)) for w in values.weights]
        _, _, kept, sums = self._loop(
            tick, self._buffer(), self._per_tick(self._buffer()), zeros
        )
        return [self._stacked(kept)[: self._num_microbatches, 0], *sums]

    def _forward_row(
        self, inputs: tf.Tensor, is_valid: tf.Tensor, *values: tf.Tensor
    ) -> list[tf.Tensor]:
        weights, constants, state = self._groups(values)
        outputs, after = self._stage(inputs, weights, constants, state)
        return [outputs, *map(tf.where, [is_valid] * len(state), after, state)]

    def _backward_row(
        self,
        inputs: tf.Tensor,
        is_valid: tf.Tensor,
        output_grads: tf.Tensor,
        *values: tf.Tensor,
    ) -> list[tf.Tensor]:
        weights, constants, state = self._groups(values)
        sources = [inputs, *weights]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            outputs, _ = self._stage(inputs, weights, constants, state)
        gradients = tape.gradient(
            outputs,
            sources,
            output_grads,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        # A row without a microbatch may give anything, as NaN.
        return [
            tf.where(is_valid, gradient, tf.zeros_like(gradient))
            for gradient in map(tf.convert_to_tensor, gradients)
        ]

    def _groups(self, values: Sequence[tf.Tensor]) -> list[Sequence[tf.Tensor]]:
        first = len(self._values.weights)
        second = first + len(self._values.constants)
        return [values[:first], values[first:second], values[second:]]

    def _stage_inputs(self, t: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the inputs of all rows at a tick, from the outputs of that before."""
        first = self._inputs[tf.minimum(t, self._num_microbatches - 1)]
        return self._select_row(0, first, _shift(outputs, 1))

    def _select_row(self, k: int, row: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
        """Returns stacked rows, row k from one tensor and the others from another."""
        chosen = tf.reshape(self._rows == k, [-1] + [1] * row.shape.rank)
        return self._partitioning.split(tf.where(chosen, row[tf.newaxis], others))

    def _valid_mask(self, t: tf.Tensor) -> tf.Tensor:
        """Returns for each row whether it has a microbatch at a tick, `[K]`."""
        m = t - self._rows
        return self._partitioning.split((m >= 0) & (m < self._num_microbatches))

    def _buffer(self) -> tf.Tensor:
        """Returns zeros in the shape of the rows' inputs, `[K, B/M, ...]`."""
        zeros = tf.zeros_like(self._inputs[0])[tf.newaxis]
        return self._partitioning.split(
            tf.tile(zeros, [self.num_stages] + [1] * (zeros.shape.rank - 1))
        )

    def _per_tick(self, example: tf.Tensor) -> tf.TensorArray:
        return tf.TensorArray(
            example.dtype, self._num_ticks, element_shape=example.shape
        )

    def _stacked(self, kept: tf.TensorArray) -> tf.Tensor:
        return self._partitioning.split(kept.stack(), axis=1)

    def _loop(self, tick: Callable[..., tuple], *carry: object) -> tuple:
        return tf.while_loop(
            lambda t, *_: t < self._num_ticks,
            tick,
            (tf.constant(0), *carry),
            maximum_iterations=self._num_ticks,
            parallel_iterations=1,
        )


def _shift(rows: tf.Tensor, by: int) -> tf.Tensor:
    """Returns rows `[K, ...]` moved by 1 or -1, with zeros in the one that is free.

    XLA makes a collective-permute of it where the rows are on cores.
    """
    rest = [[0, 0]] * (rows.shape.rank - 1)
    if by == 1:
        return tf.pad(rows[:-1], [[1, 0], *rest])
    return tf.pad(rows[1:], [[0, 1], *rest])
