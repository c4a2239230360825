"""A plan request: a model and devices, for which it estimates configurations."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tfgpipe.partition import best_partition
from tfgpipe.planner import memory, step_time
from tfgpipe.planner.devices import Device
from tfgpipe.planner.memory import Memory
from tfgpipe.planner.parallel_config import ParallelConfig
from tfgpipe.planner.step_time import StepTime
from tfgpipe.planner.workload import Layer, Workload
from tfgpipe.report import plot_memory_parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cost: TypeAlias = Callable[[ParallelConfig, Layer], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time and memory of a configuration.

    Attributes:
        config: The configuration.
        layers_per_stage: The number of layers in each stage.
        time: The time of a step.
        memory: What each device of a pipeline holds.
        mfu: Model FLOPs utilisation: what a step has to do, recomputation aside, of
            what all devices could at their peak (Chowdhery et al. 2022, appendix B).
    """

    config: ParallelConfig
    layers_per_stage: tuple[int, ...]
    time: StepTime
    memory: tuple[Memory, ...]
    mfu: float

    @property
    def fullest(self) -> Memory:
        """The memory of the device that holds most."""
        return fullest(self.memory)

    def plot_memory(
        self, *, device: Device, path: str | os.PathLike[str] | None = None
    ) -> Figure:
        """Draws the memory of each device of a pipeline, beside what it has.

        Args:
            device: What the devices are, such as `result.request.device`.
            path: Where to write the picture.

        Raises:
            ImportError: If Matplotlib is not installed.
        """
        return plot_memory_parts(
            [held.parts for held in self.memory],
            capacity=device.memory,
            title=f"{device.name}: {self.config}",
            path=path,
        )


@dataclasses.dataclass(eq=False, repr=False)
class PlanRequest:
    """A model and devices, for which it estimates any configuration.

    Attributes:
        workload: The model.
        device: The kind of device.
        num_devices: How many of them.
        batch_size: Rows of a mini-batch, over all replicas.
        num_slots: Optimizer slots of a trained weight: 2 for Adam, 1 for momentum.

    Raises:
        ValueError: If a number is below 1, or the device has no peak for the type that
            the model computes in.
    """

    workload: Workload
    _: dataclasses.KW_ONLY
    device: Device
    num_devices: int
    batch_size: int
    num_slots: float = 2

    def __post_init__(self) -> None:
        for name, least in (("num_devices", 1), ("batch_size", 1), ("num_slots", 0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ValueError(
                    f"`{name}` is a number of at least {least}. Received "
                    f"{name}={value}."
                )
        self.device.peak(self.workload.dtype)
        self._partitions: dict[tuple[object, ...], tuple[int, ...]] = {}

    def rows(self, config: ParallelConfig) -> float:
        """Returns the rows of a microbatch."""
        return self.batch_size / config.num_replicas / config.num_microbatches

    def _settings(self, config: ParallelConfig) -> dict[str, Any]:
        rows = self.rows(config)
        return {"rows": rows, "num_slots": self.num_slots, "device": self.device}

    def estimate(
        self, config: ParallelConfig, layers_per_stage: Sequence[int] | None = None
    ) -> Estimate:
        """Returns time and memory of one configuration, whether it fits or not.

        Args:
            config: The configuration.
            layers_per_stage: The number of layers in each stage. None for the best
                partition.
        """
        chosen = tuple(layers_per_stage or self.partition(config))
        settings = self._settings(config)
        time = step_time.step_time(self.workload, config, chosen, **settings)
        peak = self.device.peak(self.workload.dtype) * config.total_devices
        return Estimate(
            config=config,
            layers_per_stage=chosen,
            time=time,
            memory=self.memory(config, chosen),
            mfu=self.workload.flops * self.batch_size / time.total / peak,
        )

    def stage_times(
        self, config: ParallelConfig, layers_per_stage: Sequence[int]
    ) -> list[step_time.StageTimes]:
        """Returns what each stage takes on a microbatch."""
        return step_time.stage_times(
            self.workload,
            config,
            layers_per_stage,
            rows=self.rows(config),
            device=self.device,
        )

    def least_seconds(
        self, config: ParallelConfig, layers_per_stage: Sequence[int]
    ) -> float:
        """Returns what no step of a configuration is faster than."""
        settings = self._settings(config)
        workload = self.workload
        return step_time.least_seconds(workload, config, layers_per_stage, **settings)

    def memory(
        self, config: ParallelConfig, layers_per_stage: Sequence[int]
    ) -> tuple[Memory, ...]:
        """Returns what each device of a pipeline holds."""
        settings = self._settings(config)
        return memory.devices(self.workload, config, layers_per_stage, **settings)

    def fits(self, held: Sequence[Memory]) -> bool:
        """Returns whether the fullest device has room."""
        return fullest(held).total <= self.device.memory

    def partition(self, config: ParallelConfig) -> tuple[int, ...]:
        """Returns the number of layers in each stage.

        The slowest stage is as fast as can be; or if that does not fit, and it helps,
        the fullest is as empty as can be.
        """
        fast = self._best_partition(config, self._seconds, "time")
        if self.fits(self.memory(config, fast)):
            return fast
        lean = self._best_partition(config, self._bytes, "bytes")
        held = [fullest(self.memory(config, each)).total for each in (fast, lean)]
        return lean if held[1] < held[0] else fast

    def _best_partition(
        self, config: ParallelConfig, cost: Cost, what: str
    ) -> tuple[int, ...]:
        key = (
            *(what, config.num_stages, config.num_shards),
            *(config.remat, self.rows(config)),
        )
        if key not in self._partitions:
            layers = self.workload.layers
            self._partitions[key] = best_partition(
                [cost(config, layer) for layer in layers],
                num_stages=config.num_stages,
                may_start=[layer.may_start for layer in layers],
            )
        return self._partitions[key]

    def _seconds(self, config: ParallelConfig, layer: Layer) -> float:
        """Returns what a layer adds to its stage for a microbatch."""
        copies = dataclasses.replace(self.workload, layers=(layer,) * 3)
        one, two = step_time.stage_times(
            copies, config, (1, 2), rows=self.rows(config), device=self.device
        )
        return max(two.total - one.total, 0.0)

    def _bytes(self, config: ParallelConfig, layer: Layer) -> float:
        """Returns what a layer adds to its device, a microbatch in flight."""
        T = config.num_shards
        copies = layer.weight_bytes * (2 + self.num_slots)
        state = copies * layer.parameters / layer.shards(T)
        return state + self.rows(config) * layer.kept_bytes * layer.share(T)


def fullest(held: Sequence[Memory]) -> Memory:
    """Returns the memory of the device that holds most."""
    return max(held, key=lambda each: each.total)
