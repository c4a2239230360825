"""The interface of a distribution strategy that places stages."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.devices import Mesh


class StageStrategy(abc.ABC):
    """What a pipeline needs of a strategy beside TensorFlow's interface."""

    @property
    @abc.abstractmethod
    def mesh(self) -> Mesh:
        """The devices: `mesh.devices[replica][stage][shard]`."""

    @property
    @abc.abstractmethod
    def stage_devices(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the devices of the replica whose computation is built."""

    def weight_scope(
        self, k: int, shard: int, weight: keras.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """A weight created inside is on the devices of a shard of stage `k`.

        Unless replicas shard weights, that is `stage_scope`.
        """
        del weight
        return self.stage_scope(k, shard)

    @abc.abstractmethod
    def stage_scope(
        self, k: int, shard: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """Variables created inside are mirrored over the devices of stage `k`."""

    @abc.abstractmethod
    def slot_scope(
        self, weight: tf.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Variables created inside are on the devices of a weight's slots."""

    def stage_group_key(
        self, key: int, device: str, num_sums: int, specs: Iterable[tf.TensorSpec]
    ) -> int:
        """Returns the group key of a stage's collectives: see `replica_context`."""
        del device, num_sums, specs
        return key

    @property
    def first_replica(self) -> int:
        """The index among all replicas of TensorFlow's first."""
        return 0

    def sum_over_replicas(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a small tensor over replicas, in the context of one."""
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)

    @property
    def places_updates(self) -> bool:
        """Whether TensorFlow's own strategy places updates."""
        return False

    @abc.abstractmethod
    def apply_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: list[keras.Variable],
        gradients: list[Any],
    ) -> None:
        """Applies an optimizer to the sums of all replicas' gradients.

        Args:
            optimizer: The optimizer.
            weights: The weights.
            gradients: Those of the replica being built, None for weights without one.
        """

    def metrics_result(
        self,
        make: Callable[[], dict[str, Any]],
        metrics: Sequence[keras.metrics.Metric],
    ) -> dict[str, Any]:
        """Returns results over all replicas, in the form that Keras takes of one.

        Args:
            make: Returns the results.
            metrics: The metrics that they are of.
        """
        del metrics
        return make()

    @property
    def spans_processes(self) -> bool:
        """Whether other processes hold part of the state of metrics."""
        return False

    def update_scope(
        self, variable: tf.Variable
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns the scope in which to assign to a variable.

        Most of TensorFlow's strategies assign to a variable where it is.
        """
        del variable
        return contextlib.nullcontext()
