"""The strategy of a pipeline without replicas, and the strategy in scope.

Outside of `tf.distribute` stages are on devices of a mesh of the pipeline's own, and
sums over replicas are what is summed: nothing has to ask whether there is a strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import cluster
from tfgpipe.devices import Mesh, colocation, default_devices, make_mesh
from tfgpipe.distribution.stage_strategy import StageStrategy

_NO_DEVICES = Mesh(((),))


class SingleReplica(StageStrategy):
    """A pipeline of one replica, under no strategy of `tf.distribute`.

    Args:
        mesh: The devices; without a pipeline, none.
    """

    is_distributed = False
    title = "no strategy"

    def __init__(self, mesh: Mesh = _NO_DEVICES) -> None:
        self._mesh = mesh

    @property
    def mesh(self) -> Mesh:
        """The devices: `mesh.devices[0][stage][shard]`."""
        return self._mesh

    @property
    def stage_devices(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, its devices."""
        return self._mesh.devices[0]

    @property
    def is_current(self) -> bool:
        """True if we are in the scope of no strategy."""
        return not tf.distribute.has_strategy()

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Changes nothing."""
        return contextlib.nullcontext()

    def for_pipeline(
        self, num_stages: int | None, devices: Sequence[str] | None, num_shards: int = 1
    ) -> StageStrategy:
        """Returns one with the devices of a new pipeline."""
        current = cluster.Cluster.current
        if current is not None and current.num_replicas > 1:
            raise ValueError(
                "This process is the client of one replica of "
                f"{current.num_replicas}, whose gradients a strategy sums. "
                "Received a pipeline outside of one. Make it inside "
                "`with tfgpipe.PipelineStrategy(num_stages=...).scope():`."
            )
        if num_stages is None:
            num_stages = max(len(devices or default_devices()) // num_shards, 1)
        return SingleReplica(
            make_mesh(num_stages=num_stages, num_shards=num_shards, devices=devices)
        )

    def stage_scope(
        self, k: int, shard: int = 0
    ) -> contextlib.AbstractContextManager[Any]:
        """Variables created inside are on a device of stage `k`."""
        return tf.device(self._mesh.shard_devices(0, k)[shard])

    def slot_scope(self, weight: tf.Variable) -> contextlib.AbstractContextManager[Any]:
        """Variables created inside are on the weight's device."""
        return tf.device(weight.device)

    def copies(self, variable: tf.Variable) -> tuple[tf.Variable, ...]:
        """Returns the variable, which has no copies."""
        return (variable,)

    def is_on_one_replica(self, variable: keras.Variable) -> bool:
        """Returns False: no replica is without a copy."""
        del variable
        return False

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Takes any optimizer."""

    def apply_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: Sequence[keras.Variable] | None,
        gradients: list[Any],
    ) -> None:
        """Applies an optimizer where gradients are."""
        with colocation.colocate_with_inputs():
            type(optimizer).apply(optimizer, gradients, weights)


class OtherStrategy(SingleReplica):
    """A strategy of `tf.distribute` that is not for pipelines.

    It may have replicas, over which a model's losses are summed all the same.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__()
        self._strategy = strategy

    def for_pipeline(
        self, num_stages: int | None, devices: Sequence[str] | None, num_shards: int = 1
    ) -> StageStrategy:
        """Raises ValueError."""
        raise ValueError(
            "A PipelinedLayer runs under `tfgpipe.PipelineStrategy`, or under no "
            f"strategy at all. Received {type(self._strategy).__name__}. Use "
            "`tfgpipe.PipelineStrategy(num_stages=..., num_replicas=...)`."
        )

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Raises ValueError: gradients would not be summed over its replicas."""
        raise ValueError(
            "An optimizer of a pipeline sums gradients over the replicas of a "
            f"`tfgpipe.PipelineStrategy`. Received one under "
            f"{type(self._strategy).__name__}. Use that strategy, or make another "
            "optimizer."
        )


def current_strategy() -> StageStrategy:
    """Returns the strategy in scope, which without one is a `SingleReplica`."""
    if not tf.distribute.has_strategy():
        return SingleReplica()
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, StageStrategy):
        return strategy
    return OtherStrategy(strategy)
