"""The devices of a pipeline's stages, and bringing variables to them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import mesh as mesh_lib
from tfgpipe import seams
from tfgpipe.mesh import Mesh
from tfgpipe.strategy import PipelineStrategy, current_replica, current_strategy


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the stages of one pipeline are.

    Attributes:
        mesh: The devices.
        strategy: The strategy whose they are, or None.
    """

    mesh: Mesh
    strategy: PipelineStrategy | None

    @property
    def devices(self) -> tuple[str, ...]:
        """For each stage, the device of the replica being built."""
        return self.mesh.grid[current_replica()]

    def put(self, k: int, variables: Iterable[keras.Variable]) -> None:
        """Makes variables live, or come to life, on the devices of stage `k`."""
        device = None if self.strategy else self.mesh.grid[0][k]
        for variable in variables:
            seams.place(variable, lambda: self._scope(k), device)

    def check_strategy(self, name: str) -> None:
        """Raises RuntimeError if a layer is used under another strategy."""
        strategy = current_strategy()
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

    def _scope(self, k: int) -> contextlib.AbstractContextManager[Any]:
        if self.strategy is None:
            return tf.device(self.mesh.grid[0][k])
        return self.strategy.stage_scope(k)


def choose(num_stages: int | None, devices: Sequence[str] | None) -> Placement:
    """Returns the placement for a new pipeline: the strategy's in scope, if any.

    Args:
        num_stages: K, or None for as many stages as there are devices.
        devices: Names of devices, or None for those that are there.

    Raises:
        ValueError: If devices are missing, are given under a strategy, or the strategy
            is none for pipelines.
    """
    strategy = current_strategy()
    if isinstance(strategy, PipelineStrategy):
        mesh = strategy.mesh
        if devices is not None or num_stages not in (None, mesh.num_stages):
            raise ValueError(
                "Under a PipelineStrategy the strategy decides stages and devices. "
                f"Received num_stages={num_stages}, devices={devices} under a strategy "
                f"of {mesh.num_stages} stages. Leave both out, or change the strategy."
            )
        return Placement(mesh, strategy)
    if strategy is not None:
        raise ValueError(
            "A PipelinedLayer runs under `tfgpipe.PipelineStrategy` or under no "
            f"strategy at all. Received {_describe(strategy)}. Use "
            "`tfgpipe.PipelineStrategy(num_stages=..., num_replicas=...)`."
        )
    if num_stages is None:
        num_stages = len(devices) if devices else len(mesh_lib.default_devices())
    return Placement(mesh_lib.make_mesh(num_stages=num_stages, devices=devices), None)


def _describe(strategy: tf.distribute.Strategy | None) -> str:
    return "no strategy" if strategy is None else type(strategy).__name__
