"""Replicas of a strategy: all in this process, or each a process of its own.

TensorFlow sums over the replicas of one process, which are built side by side. Replicas
that are processes sum by collective operations: see `process_group`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.distribution.stage_strategy import static_replica_index


class Replicas(abc.ABC):
    """The replicas of a strategy, seen from the one whose computation is built."""

    @property
    @abc.abstractmethod
    def num_processes(self) -> int:
        """The number of processes that have replicas."""

    @property
    @abc.abstractmethod
    def index(self) -> int:
        """The index of this replica among all."""

    @property
    @abc.abstractmethod
    def local_index(self) -> int:
        """The index of this replica among those of this process."""

    @abc.abstractmethod
    def stage_group_key(
        self, key: int, device: str, num_sums: int, specs: Iterable[tf.TensorSpec]
    ) -> int:
        """Returns the group key of a stage: see `StageStrategy.stage_group_key`."""

    @abc.abstractmethod
    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a tensor over all replicas, in the context of one."""

    @abc.abstractmethod
    def sum_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: Sequence[keras.Variable],
        gradients: Sequence[Any],
    ) -> list[Any]:
        """Returns gradients summed over processes, on their weights' devices.

        Args:
            optimizer: The optimizer.
            weights: The weights.
            gradients: Gradients of this replica, None for weights without one.
        """

    @abc.abstractmethod
    def metrics_result(
        self,
        make: Callable[[], dict[str, Any]],
        metrics: Sequence[keras.metrics.Metric],
    ) -> dict[str, Any]:
        """Returns results of metrics over all replicas."""


class LocalReplicas(Replicas):
    """Replicas of this process alone."""

    @property
    def num_processes(self) -> int:
        """One."""
        return 1

    @property
    def index(self) -> int:
        """The index of this replica."""
        return static_replica_index()

    @property
    def local_index(self) -> int:
        """The index of this replica."""
        return static_replica_index()

    def stage_group_key(
        self, key: int, device: str, num_sums: int, specs: Iterable[tf.TensorSpec]
    ) -> int:
        """Returns the key, which is unique in this process."""
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
