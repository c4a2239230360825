"""Placement of a pipeline's stages: chooses devices, moves variables to them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import cluster
from tfgpipe._compat import keras_internals
from tfgpipe.devices import Mesh, default_devices, make_mesh
from tfgpipe.distribution import replica_context
from tfgpipe.distribution.stage_strategy import StageStrategy


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of the stages of one pipeline.

    Attributes:
        mesh: The devices.
        strategy: The strategy that the devices belong to, or None.
    """

    mesh: Mesh
    strategy: StageStrategy | None

    @property
    def devices(self) -> tuple[str, ...]:
        """For each stage, the device of the replica being built."""
        return tuple(primary for primary, *_ in self.shard_devices)

    @property
    def shard_devices(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the devices of its shards in the replica being built."""
        return self.strategy.stage_devices if self.strategy else self.mesh.devices[0]

    def place_variables(
        self, k: int, variables: Iterable[keras.Variable], shard: int = 0
    ) -> None:
        """Places variables, initialized or not, on the devices of stage `k`.

        Args:
            k: The stage.
            variables: The variables.
            shard: Which of its devices in each replica.
        """
        device = None if self.strategy else self.mesh.shard_devices(0, k)[shard]
        for variable in variables:
            keras_internals.initialize_in_scope(
                variable, functools.partial(self._scope, k, shard, variable), device
            )

    def place_slots(
        self,
        k: int,
        shard: int,
        weight: keras.Variable,
        optimizer: keras.optimizers.Optimizer,
    ) -> None:
        """Moves an optimizer's slots for a weight to the weight's devices."""
        for slot in optimizer_slots(optimizer, [weight]):
            if self.strategy is None:
                self.place_variables(k, [slot], shard)
            else:
                scope = functools.partial(self.strategy.slot_scope, weight.value)
                keras_internals.initialize_in_scope(slot, scope, None)

    def check_strategy(self, name: str) -> None:
        """Raises RuntimeError if a layer is used under another strategy."""
        strategy = replica_context.current_strategy()
        if strategy is self.strategy:
            return
        way_out = (
            "Create the model inside `with strategy.scope():`, or leave the strategy "
            "out."
            if self.strategy is None
            else "Call it inside `with strategy.scope():` as well."
        )
        raise RuntimeError(
            f"Layer '{name}' must be made, built and called under the same "
            f"distribution strategy. Expected {_describe(self.strategy)}, under which "
            f"it was made; received {_describe(strategy)}. {way_out}"
        )

    def check_shards(self, num_shards: int) -> None:
        """Raises ValueError if the built layers' shard count differs from the mesh's.

        Layers that create other layers in `build` show them only after that.
        """
        if num_shards < self.mesh.num_shards:
            warnings.warn(
                f"No layer is in shards. Received {self.mesh.num_shards} devices for "
                "each stage, of which all but the first do nothing. Use layers such "
                "as `tfgpipe.layers.TPDense`, or leave `num_shards` out.",
                stacklevel=2,
            )
        if num_shards not in (1, self.mesh.num_shards):
            raise ValueError(
                f"Stages here have {self.mesh.num_shards} devices each. Received "
                f"layers that turn out to be in {num_shards} shards when they are "
                "built. Have them make their layers in `__init__`, or make the "
                "pipeline under `tfgpipe.PipelineStrategy(num_shards="
                f"{num_shards}, ...)`."
            )

    def _scope(
        self, k: int, shard: int, variable: keras.Variable
    ) -> contextlib.AbstractContextManager[Any]:
        if self.strategy is None:
            return tf.device(self.mesh.shard_devices(0, k)[shard])
        if variable.trainable:
            return self.strategy.weight_scope(k, shard, variable)
        return self.strategy.stage_scope(k, shard)


def choose_placement(
    num_stages: int | None, devices: Sequence[str] | None, num_shards: int = 1
) -> Placement:
    """Returns the placement for a new pipeline: the strategy's in scope, if any.

    Args:
        num_stages: K, or None for as many stages as there are devices.
        devices: Names of devices, or None for the default ones.
        num_shards: T, how many shards its layers are split into.

    Raises:
        ValueError: If devices are missing, are named under a strategy, or the strategy
            is not for pipelines, or for another number of shards.
    """
    strategy = replica_context.current_strategy()
    if isinstance(strategy, StageStrategy):
        mesh = strategy.mesh
        if devices is not None or num_stages not in (None, mesh.num_stages):
            raise ValueError(
                f"Under a {type(strategy).__name__} the strategy decides stages and "
                f"devices. Received num_stages={num_stages}, devices={devices} under a "
                f"strategy of {mesh.num_stages} stages. Leave both out, or change the "
                "strategy."
            )
        if num_shards not in (1, mesh.num_shards):
            raise ValueError(
                "Under a PipelineStrategy the strategy decides how many devices a "
                f"stage has. Received layers in {num_shards} shards under a strategy "
                f"of {mesh.num_shards}. Make them with num_shards={mesh.num_shards}, "
                f"or the strategy: `tfgpipe.PipelineStrategy(num_shards={num_shards}, "
                "...)`."
            )
        return Placement(mesh, strategy)
    if strategy is not None:
        raise ValueError(
            "A PipelinedLayer runs under `tfgpipe.PipelineStrategy`, on TPUs under "
            "`tfgpipe.TPUPipelineStrategy`, or under no strategy at all. Received "
            f"{_describe(strategy)}. Use "
            "`tfgpipe.PipelineStrategy(num_stages=..., num_replicas=...)`."
        )
    if cluster.Cluster.current is not None and cluster.Cluster.current.num_replicas > 1:
        raise ValueError(
            "This process is the client of one replica of "
            f"{cluster.Cluster.current.num_replicas}, whose gradients a strategy sums. "
            "Received a pipeline outside of one. Make it inside "
            "`with tfgpipe.PipelineStrategy(num_stages=...).scope():`."
        )
    if num_stages is None:
        num_stages = max(len(devices or default_devices()) // num_shards, 1)
    mesh = make_mesh(num_stages=num_stages, num_shards=num_shards, devices=devices)
    return Placement(mesh, None)


def _describe(strategy: tf.distribute.Strategy | StageStrategy | None) -> str:
    return "no strategy" if strategy is None else type(strategy).__name__


def optimizer_slots(
    optimizer: keras.optimizers.Optimizer, weights: Iterable[keras.Variable]
) -> list[keras.Variable]:
    """Returns the slots of a built optimizer for some weights."""
    slots = keras_internals.optimizer_slots(optimizer)
    return [slot for weight in weights for slot in slots.get(weight, ())]
