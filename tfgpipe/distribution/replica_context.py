"""The replica being built: its index, sums over replicas, copies of variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.distribution.stage_strategy import StageStrategy


def replica_copies(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """Returns the copies of a variable, one per replica, or the variable itself."""
    return tf.distribute.get_strategy().experimental_local_results(variable)


def current_strategy() -> tf.distribute.Strategy | None:
    """Returns the distribution strategy whose scope we are in, or None."""
    return tf.distribute.get_strategy() if tf.distribute.has_strategy() else None


def stage_strategy() -> StageStrategy | None:
    """Returns the strategy in scope if it is one for pipelines."""
    strategy = current_strategy()
    return strategy if isinstance(strategy, StageStrategy) else None


def is_on_one_replica(variable: keras.Variable) -> bool:
    """Returns whether this process has replicas without a copy of a variable."""
    strategy = stage_strategy()
    if strategy is None or strategy.spans_processes:  # Those have one each.
        return False
    return len(replica_copies(variable.value)) == 1 < strategy.mesh.num_replicas


def stage_group_key(
    key: int, device: str, num_sums: int, specs: Iterable[tf.TensorSpec]
) -> int:
    """Returns the key of the group of a stage's replicas.

    Args:
        key: A key that is unique in this process.
        device: The stage's.
        num_sums: How many collectives a microbatch takes part in.
        specs: Shapes and types of the stage's variables.
    """
    strategy = stage_strategy()
    if strategy is None:
        return key
    return strategy.stage_group_key(key, device, num_sums, specs)


def metrics_result(model: keras.Model) -> dict[str, Any]:
    """Returns results of a model's metrics over all replicas, as Keras takes them."""
    strategy, make = stage_strategy(), model.get_metrics_result
    return make() if strategy is None else strategy.metrics_result(make, model.metrics)


def assign(variable: keras.Variable, value: tf.Tensor) -> None:
    """Assigns a value to a variable where the variable is."""
    strategy = stage_strategy()
    if strategy is None:
        variable.assign(value)
    else:
        with strategy.update_scope(variable.value):
            variable.assign(value)


def current_num_replicas() -> int:
    """Returns how many replicas a mini-batch is divided among."""
    context = tf.distribute.get_replica_context()
    return 1 if context is None else context.num_replicas_in_sync


def sum_over_replicas(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sum of a small tensor over replicas."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tensor
    strategy = stage_strategy()
    if strategy is not None:
        return strategy.sum_over_replicas(tensor)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)


def batch_fraction(tensor: tf.Tensor) -> tf.Tensor:
    """Returns this replica's fraction of the global batch `[B, ...]`, `[]`."""
    rows = tf.cast(tf.shape(tensor)[0], tf.float64)
    if current_num_replicas() == 1:
        return tf.ones_like(rows)
    return tf.math.divide_no_nan(rows, sum_over_replicas(rows))


def static_replica_index() -> int:
    """Returns the index in this process of the replica whose computation is built.

    Not on TPUs, where one is built for all.
    """
    index = _local_index()
    assert isinstance(index, int)
    return index


def replica_index() -> int | tf.Tensor:
    """Returns the index of the replica, as a tensor where it is not static."""
    strategy = stage_strategy()
    return _local_index() + (0 if strategy is None else strategy.first_replica)


def _local_index() -> int | tf.Tensor:
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0  # Across replicas, as when shapes are inferred.
    index = context.replica_id_in_sync_group
    known = tf.get_static_value(index)
    return index if known is None else int(known)
