"""Microbatches without rows.

Where the size of a mini-batch is not known, or replicas have different numbers of rows,
a microbatch may turn out to have none. Most layers make no sense of that, so a stage
function is not run on it:

    skipped     outputs have no rows either, the carry and accumulators stay
    padded      where other replicas or shards wait for this one, it is run on a row
                that is made up: none harms by a row whose outputs are cut off and whose
                gradient is zero. The carry stays, but for what all replicas compute
                alike from the rows that the others have
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfgpipe.capture import is_differentiable
from tfgpipe.graph import joint_graph

NamedTensors = dict[str, tf.Tensor]
# From values and accumulators to what is made, by name, and updated accumulators.
Compute = Callable[
    [NamedTensors, Sequence[tf.Tensor]], tuple[NamedTensors, list[tf.Tensor]]
]


def guarded(
    trace: joint_graph.JointGraph,
    compute: Compute,
    fetches: Sequence[str],
    keep: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
    *,
    always_runs: bool,
) -> Callable[
    [tf.Tensor, NamedTensors, Sequence[tf.Tensor]], tuple[NamedTensors, list[tf.Tensor]]
]:
    """Returns a stage function for any number of rows, which is its first argument.

    Args:
        trace: The stage.
        compute: The function, for some rows.
        fetches: Names of what it makes.
        keep: Returns the accumulators as they are after no rows.
        always_runs: True to run it even without examples.
    """
    before = dict(zip(trace.new_carry, trace.carry, strict=True))
    input_grads = joint_graph.not_none(*trace.backward.input_grads)
    by_row = {*trace.forward.outputs, *input_grads}

    def skip(
        values: NamedTensors, sums: Sequence[tf.Tensor]
    ) -> tuple[NamedTensors, list[tf.Tensor]]:
        made = {
            fetch: values[before[fetch]]
            if fetch in before
            else _without_rows(trace.spec(fetch))
            for fetch in fetches
        }
        return made, keep(sums)

    def padded(
        rows: tf.Tensor, values: NamedTensors, sums: Sequence[tf.Tensor]
    ) -> tuple[NamedTensors, list[tf.Tensor]]:
        made, sums = compute(_with_a_row(trace, values, rows), sums)
        for fetch in fetches:
            if fetch in trace.over_replicas:
                continue
            if fetch in before:
                made[fetch] = tf.where(rows > 0, made[fetch], values[before[fetch]])
            elif fetch in by_row:
                made[fetch] = made[fetch][:rows]
        return made, sums

    def run_or_skip(
        rows: tf.Tensor, values: NamedTensors, sums: Sequence[tf.Tensor]
    ) -> tuple[NamedTensors, list[tf.Tensor]]:
        def flat(function: Compute) -> list[tf.Tensor]:
            made, totals = function(values, sums)
            return [*(made[fetch] for fetch in fetches), *totals]

        results = tf.cond(rows > 0, lambda: flat(compute), lambda: flat(skip))
        made = dict(zip(fetches, results, strict=False))
        return made, list(results[len(fetches) :])

    return padded if always_runs else run_or_skip


def _with_a_row(
    trace: joint_graph.JointGraph, values: NamedTensors, rows: tf.Tensor
) -> NamedTensors:
    """Returns values with one row made up where there is none."""
    output_grads = joint_graph.not_none(*trace.backward.output_grads)
    by_row = {*trace.given.inputs, *trace.forward.outputs} - set(trace.per_step)
    return {
        name: _dummy_row(value, rows, 0)
        if name in output_grads
        else _dummy_row(value, rows, int(is_differentiable(value)))
        if name in by_row
        else value
        for name, value in values.items()
    }


def _without_rows(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns an empty tensor of the given dtype, which is never read."""
    if spec.dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=0, element_dtype=tf.float32
        )
    rank = spec.shape.rank or 0
    return tf.zeros([spec.shape[axis] or 0 for axis in range(rank)], spec.dtype)


def _dummy_row(tensor: tf.Tensor, rows: tf.Tensor, value: int) -> tf.Tensor:
    """Returns a row of one value in place of a tensor without rows."""

    def row() -> tf.Tensor:
        sizes = tf.maximum(tf.shape(tensor)[1:], 1)
        return tf.fill(tf.concat([[1], sizes], 0), tf.cast(value, tensor.dtype))

    filled = tf.cond(rows > 0, lambda: tensor, row)
    return tf.ensure_shape(filled, tensor.shape)
