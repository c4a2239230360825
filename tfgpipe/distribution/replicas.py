"""Replicas of this process, which TensorFlow builds side by side and sums over.

Replicas that are processes sum by collective operations: see `process_group`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.distribution.stage_strategy import static_replica_index

# Odd and far from any small multiple of itself, within the range of a seed.
_SEED_STRIDE = 0x1E3779B1


def seed_offset(replica: int | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the seed of a replica minus that of the first."""
    offset = tf.cast(replica, tf.int64) * _SEED_STRIDE % 2**31
    return tf.cast([offset, 0], dtype)


class LocalReplicas:
    """Replicas of this process alone.

    A `ProcessGroup` answers the same questions.
    """

    num_processes = 1

    @property
    def index(self) -> int:
        """The index of this replica."""
        return static_replica_index()

    local_index = index

    def stage_group_key(
        self, key: int, device: str, num_sums: int, specs: Iterable[tf.TensorSpec]
    ) -> int:
        """Returns the group key of a stage: `key`, which is unique in this process."""
        del device, num_sums, specs
        return key

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns TensorFlow's sum over replicas."""
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)

    def sum_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: Sequence[keras.Variable],
        gradients: Sequence[Any],
    ) -> list[Any]:
        """Returns the gradients of this replica: no other process has any."""
        del optimizer, weights
        return list(gradients)

    def metrics_result(
        self,
        make: Callable[[], dict[str, Any]],
        metrics: Sequence[keras.metrics.Metric],
    ) -> dict[str, Any]:
        """Returns results of metrics that each replica has added to."""
        del metrics
        context = tf.distribute.get_replica_context()
        return make() if context is None else context.merge_call(lambda _: make())
