"""A plan request: a model and devices, for which it estimates configurations."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tfgpipe._util import argument_checks
from tfgpipe.costs import LayerCost, Memory, tables
from tfgpipe.partition import best_partition
from tfgpipe.planner import memory, step_time
from tfgpipe.planner.devices import Device
from tfgpipe.planner.parallel_config import ParallelConfig
from tfgpipe.planner.step_time import StepTime
from tfgpipe.planner.workload import StagedWorkload, Workload
from tfgpipe.report import plot_memory_parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cost: TypeAlias = Callable[[ParallelConfig, LayerCost, Device], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time and memory of a configuration.

    Attributes:
        config: The configuration.
        layers_per_stage: The number of layers in each stage.
        time: The time of a step.
        memory: Memory of each device of a pipeline.
        devices: The kind of each device of a pipeline.
        mfu: Model FLOPs utilisation: what a step has to do, recomputation aside, of
            what all devices could at their peak (Chowdhery et al. 2022, appendix B).
    """

    config: ParallelConfig
    layers_per_stage: tuple[int, ...]
    time: StepTime
    memory: tuple[Memory, ...]
    devices: tuple[Device, ...]
    mfu: float

    @property
    def fullest(self) -> Memory:
        """The memory of the device that has least left, of what it has."""
        return self._fullest[0]

    @property
    def missing_bytes(self) -> float:
        """Bytes that the fullest device lacks; below 0 if it has some left."""
        return _missing_bytes(self._fullest)

    @property
    def capacity(self) -> float:
        """Bytes that the fullest device has."""
        return self._fullest[1].memory

    @property
    def _fullest(self) -> tuple[Memory, Device]:
        return max(zip(self.memory, self.devices, strict=True), key=_missing_bytes)

    def plot_memory(self, *, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draws the memory of each device of a pipeline, beside what it has.

        Args:
            path: File to write the picture to.

        Raises:
            ImportError: If Matplotlib is not installed.
        """
        unique_names = dict.fromkeys(device.name for device in self.devices)
        return plot_memory_parts(
            [held.parts for held in self.memory],
            capacities=[device.memory for device in self.devices],
            title=f"{', '.join(unique_names)}: {self.config}",
            path=path,
        )


@dataclasses.dataclass(eq=False, repr=False)
class PlanRequest:
    """A model and devices, for which it estimates any configuration.

    Attributes:
        workload: The model.
        device: The kind of device.
        num_devices: Number of devices.
        more: Devices of other kinds, with the number of each. Of each pipeline the
            first stages are on devices of the first kind, as many of each as in all.
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
    more: tuple[tuple[Device, int], ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("num_devices", 1), ("batch_size", 1), ("num_slots", 0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ValueError(
                    f"`{name}` is a number of at least {least}. Received "
                    f"{name}={value}."
                )
        for device, _ in self.kinds:
            device.peak(self.workload.dtype)
        for _, count in self.more:
            argument_checks.check_count("num_devices", count)
        self._partitions: dict[tuple[object, ...], tuple[int, ...]] = {}

    @property
    def kinds(self) -> tuple[tuple[Device, int], ...]:
        """The kinds of devices, with the number of each."""
        return ((self.device, self.num_devices), *self.more)

    @property
    def total_devices(self) -> int:
        """The number of devices of all kinds."""
        return sum(count for _, count in self.kinds)

    def has_devices(self, config: ParallelConfig) -> bool:
        """Returns whether pipelines can have devices of each kind in proportion."""
        return len(self._kinds_along(config)) == config.num_devices

    def _kinds_along(self, config: ParallelConfig) -> list[int]:
        """Returns the index of each device's kind in a pipeline, as far as they go."""
        P, total = config.num_devices, self.total_devices
        found: list[int] = []
        for i, (_, count) in enumerate(self.kinds):
            found += [i] * (P * count // total)
        return found

    def _devices(self, config: ParallelConfig) -> tuple[Device, ...]:
        """Returns the kind of each device of a pipeline."""
        return tuple(self.kinds[i][0] for i in self._kinds_along(config))

    def host_bandwidths(self, config: ParallelConfig) -> tuple[float | None, ...]:
        """Returns the bytes a second from each device of a pipeline to its host."""
        return tuple(device.host_bandwidth for device in self._devices(config))

    def microbatch_size(self, config: ParallelConfig) -> float:
        """Returns the number of examples of a microbatch."""
        return self.batch_size / config.num_replicas / config.num_microbatches

    def staged(
        self, config: ParallelConfig, layers_per_stage: Sequence[int]
    ) -> StagedWorkload:
        """Returns the stages of a configuration."""
        return StagedWorkload(
            workload=self.workload,
            config=config,
            layers_per_stage=tuple(layers_per_stage),
            examples=self.microbatch_size(config),
            num_slots=self.num_slots * config.slot_share,
            devices=self._devices(config),
        )

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
        config = step_time.ordered(self.staged(config, chosen))
        time = step_time.step_time(self.staged(config, chosen))
        devices, dtype = self._devices(config), self.workload.dtype
        each = math.fsum(device.peak(dtype) for device in devices)
        peak = each * config.num_replicas * config.num_shards
        return Estimate(
            config=config,
            layers_per_stage=chosen,
            time=time,
            memory=self.memory(config, chosen),
            devices=devices,
            mfu=self.workload.flops * self.batch_size / time.total / peak,
        )

    def stage_times(
        self, config: ParallelConfig, layers_per_stage: Sequence[int]
    ) -> list[step_time.StageTimes]:
        """Returns the times of each stage on a microbatch."""
        return step_time.stage_times(self.staged(config, layers_per_stage))

    def lower_bound_seconds(
        self, config: ParallelConfig, layers_per_stage: Sequence[int]
    ) -> float:
        """Returns the seconds that no step of a configuration is faster than."""
        return step_time.lower_bound_seconds(self.staged(config, layers_per_stage))

    def memory(
        self, config: ParallelConfig, layers_per_stage: Sequence[int]
    ) -> tuple[Memory, ...]:
        """Returns the memory of each device of a pipeline."""
        return memory.devices(self.staged(config, layers_per_stage))

    def missing_bytes(self, config: ParallelConfig, held: Sequence[Memory]) -> float:
        """Returns the bytes that the fullest device lacks; below 0 for those left."""
        return max(map(_missing_bytes, zip(held, self._devices(config), strict=True)))

    def fits(self, config: ParallelConfig, held: Sequence[Memory]) -> bool:
        """Returns whether the fullest device has room."""
        return self.missing_bytes(config, held) <= 0

    def partition(self, config: ParallelConfig) -> tuple[int, ...]:
        """Returns the number of layers in each stage.

        The slowest stage is as fast as can be; or if that does not fit, and it helps,
        the fullest is as empty as can be.
        """
        fast = self._best_partition(config, self._seconds)
        missing = self.missing_bytes(config, self.memory(config, fast))
        if missing <= 0:
            return fast
        lean = self._best_partition(config, self._bytes)
        less = self.missing_bytes(config, self.memory(config, lean)) < missing
        return lean if less else fast

    def _best_partition(self, config: ParallelConfig, cost: Cost) -> tuple[int, ...]:
        key = (
            *(cost, config.num_stages, config.num_shards, config.shard_axis),
            config.slot_share,
            *(config.remat, config.load.recomputed_fractions[0]),
            self.microbatch_size(config),
            config.load.placement if self.more else None,
        )
        if key not in self._partitions:
            layers = self.workload.layers
            kinds = self._kinds_along(config)

            def costs(kind: Any) -> list[float]:
                return [cost(config, layer, self.kinds[kind][0]) for layer in layers]

            self._partitions[key] = best_partition(
                costs(0)
                if not any(kinds)
                else tables.StageTables(
                    [kinds[p] for p in config.load.placement],
                    lambda kind: tables.range_sums(costs(kind)),
                ),
                num_stages=config.num_stages,
                may_start=[layer.may_start for layer in layers],
            )
        return self._partitions[key]

    def _seconds(
        self, config: ParallelConfig, layer: LayerCost, device: Device
    ) -> float:
        """Returns the seconds that a layer adds to its stage for a microbatch."""
        sizes: dict[str, Any] = {
            "examples": self.microbatch_size(config),
            "num_shards": config.num_shards,
            "device": device,
            "dtype": self.workload.dtype,
        }
        computed = step_time.layer_seconds(
            layer,
            **sizes,
            axis=config.shard_axis,
            saves_results=config.remat.saves_results,
        )
        reduced = config.shard_axis.exchange_seconds(layer, **sizes)
        # Amid a stage, a backward recomputes a layer as often as the first of many.
        again = config.load.recomputed(0, 2 * len(self.workload.layers))[0]
        each = (x.forward + again * x.again + x.backward for x in (computed, reduced))
        return sum(each)

    def _bytes(self, config: ParallelConfig, layer: LayerCost, device: Device) -> float:
        """Returns the bytes that a layer adds to its device, with one microbatch.

        Of unequal devices they are those that it adds to the largest, in proportion.
        """
        held = memory.layer_bytes(
            layer,
            examples=self.microbatch_size(config),
            num_shards=config.num_shards,
            axis=config.shard_axis,
            dtype=self.workload.dtype,
        )
        slots = self.num_slots * config.slot_share
        added = held.weights + (1 + slots) * held.trained + held.saved
        return added * (max(x.memory for x, _ in self.kinds) / device.memory)


def _missing_bytes(held_on: tuple[Memory, Device]) -> float:
    """Returns the bytes that a device lacks for what it is to hold."""
    held, device = held_on
    return float(held.total - device.memory)
