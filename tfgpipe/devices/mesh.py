"""The mesh of devices that a pipeline runs on: replicas down, stages across.

             stage 0         stage 1         stage 2
replica 0     GPU:0  GPU:1    GPU:2  GPU:3    GPU:4  GPU:5
replica 1     GPU:6  GPU:7    GPU:8  GPU:9   GPU:10  GPU:11

Where layers are split into shards a stage has a device for each. The first of them is
the stage's *primary device*: what is not sharded is there.

Over two hosts (see `tfgpipe.cluster`) stages are spread over them in order, all
replicas of a stage on one:

             stage 0        stage 1        stage 2        stage 3
replica 0  worker:0/GPU:0 worker:0/GPU:2 worker:1/GPU:0 worker:1/GPU:2
replica 1  worker:0/GPU:1 worker:0/GPU:3 worker:1/GPU:1 worker:1/GPU:3
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tfgpipe._util import argument_checks
from tfgpipe.devices.names import (
    default_devices,
    device_advice,
    devices_of_workers,
    full_device_name,
    host_device,
    is_remote,
    short_name,
    visible_devices,
)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A mesh of TensorFlow device names, `devices[replica][stage][shard]`.

    Shape and names of its axes are called as in `keras.distribution.DeviceMesh`.
    """

    devices: tuple[tuple[tuple[str, ...], ...], ...]

    axis_names: ClassVar[tuple[str, ...]] = ("replica", "stage", "shard")

    @property
    def shape(self) -> tuple[int, int, int]:
        """D, K and T, the sizes of the axes."""
        return self.num_replicas, self.num_stages, self.num_shards

    @property
    def num_replicas(self) -> int:
        """D, the number of rows."""
        return len(self.devices)

    @property
    def num_stages(self) -> int:
        """K, the number of columns."""
        return len(self.devices[0])

    @property
    def num_shards(self) -> int:
        """T, the number of devices of a stage."""
        return len(self.devices[0][0])

    @property
    def primary_devices(self) -> tuple[tuple[str, ...], ...]:
        """The primary devices, `[replica][stage]`."""
        return tuple(tuple(each[0] for each in replica) for replica in self.devices)

    @property
    def placement(self) -> tuple[int, ...]:
        """For each stage, the index of its primary device within its replica."""
        first = self.primary_devices[0]
        devices = list(dict.fromkeys(first))
        return tuple(map(devices.index, first))

    def replica_devices(self, k: int, shard: int = 0) -> tuple[str, ...]:
        """Returns the devices of stage `k` and a shard of it, one a replica."""
        return tuple(replica[k][shard] for replica in self.devices)

    def shard_devices(self, replica: int, k: int) -> tuple[str, ...]:
        """Returns the devices of stage `k` in one replica, one a shard."""
        return self.devices[replica][k]

    def short_names(self, k: int) -> str:
        """Returns the devices of stage `k` as people read them.

        Those of its shards are joined by a plus sign, those of replicas by a comma.
        """
        of_replicas = (replica[k] for replica in self.devices)
        return ", ".join(" + ".join(map(short_name, names)) for names in of_replicas)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class ShardingSpec:
    """Along which axis of a mesh each axis of a weight is split.

    As `PartitionSpec` in JAX and the `axes` of `keras.distribution.TensorLayout`.

    Example:

    >>> tfgpipe.ShardingSpec(None, "shard")  # A kernel, split by columns.
    ShardingSpec(None, "shard")

    Args:
        *axes: For each axis of the weight the name of one of the mesh, or None for one
            that is not split.

    Raises:
        ValueError: If an axis is none of a mesh.
    """

    axes: tuple[str | None, ...]

    def __init__(self, *axes: str | None) -> None:
        unknown = [axis for axis in axes if axis not in (None, *Mesh.axis_names)]
        if unknown:
            raise ValueError(
                f"The axes of a mesh are {', '.join(Mesh.axis_names)}. Received "
                f"{unknown[0]!r} in a ShardingSpec. Use one of them, or None for an "
                "axis that is not split."
            )
        object.__setattr__(self, "axes", axes)

    def __str__(self) -> str:
        names = [f'"{axis}"' if axis else "None" for axis in self.axes]
        return f"({', '.join(names)}{',' if len(names) == 1 else ''})"

    def __repr__(self) -> str:
        return f"ShardingSpec{str(self).replace(',)', ')')}"


def make_mesh(
    *,
    num_stages: int,
    num_replicas: int = 1,
    num_shards: int = 1,
    devices: Sequence[str] | None = None,
    workers: range | None = None,
) -> Mesh:
    """Lays devices out as a mesh.

    Shards of one stage are next to each other, and then stages of one replica.

    Args:
        num_stages: K, the number of stages.
        num_replicas: D, the number of copies of the pipeline.
        num_shards: T, the number of devices of a stage.
        devices: D * K * T device names such as `"GPU:0"`. Defaults to the visible
            TPUs, else GPUs, else logical CPUs; in a cluster to those of its workers.
        workers: Indices of the cluster's workers that have these devices. Defaults to
            all.

    Raises:
        ValueError: If there are too few devices, or more are named, or one that does
            not exist or is of another worker.
    """
    num_stages = argument_checks.check_count("num_stages", num_stages)
    num_replicas = argument_checks.check_count("num_replicas", num_replicas)
    num_shards = argument_checks.check_count("num_shards", num_shards)
    devices = argument_checks.check_device_names(devices)
    needed = num_replicas * num_stages * num_shards
    if devices is not None:
        names = _named_devices(devices, needed, workers)
    elif of_workers := devices_of_workers():
        if workers is not None:
            of_workers = of_workers[workers.start : workers.stop]
        names = _spread_over_workers(of_workers, num_stages, num_replicas, num_shards)
    else:
        names = default_devices()
    if len(names) < needed or (devices is not None and len(names) > needed):
        product = f"{num_stages} stages x {num_replicas} replicas"
        if num_shards > 1:
            product += f" x {num_shards} shards"
        advice = device_advice(needed) if len(names) < needed else "Leave some out."
        raise ValueError(
            f"{product} need {needed} devices, one each. Received {len(names)}: "
            f"{', '.join(map(short_name, names))}. {advice}"
        )
    shape = (num_replicas, num_stages, num_shards)
    grid = np.reshape(names[:needed], shape).tolist()
    return Mesh(tuple(tuple(map(tuple, replica)) for replica in grid))


def _named_devices(
    devices: Sequence[str], needed: int, workers: range | None
) -> list[str]:
    """Returns the full names of devices, all of which there are."""
    visible = visible_devices()
    names = [full_device_name(device) for device in devices]
    unknown = [d for d, n in zip(devices, names, strict=True) if n not in visible]
    if unknown:
        raise ValueError(
            "`devices` must name devices that TensorFlow sees. Received "
            f"{', '.join(unknown)}; TensorFlow sees {', '.join(visible)}. "
            + device_advice(needed)
        )
    if workers is not None:
        _check_workers(names, workers)
    return names


def check_primary_devices(mesh: Mesh) -> None:
    """Raises ValueError if the primary devices of the last stage are on several hosts.

    The loss is on them, and a strategy's own devices must share a host.
    """
    last = mesh.replica_devices(mesh.num_stages - 1)
    if len(set(map(host_device, last))) > 1:
        raise ValueError(
            "The last stages of all replicas must be on one host, since the loss, the "
            "metrics and all variables outside the pipeline live there. Received "
            f"{', '.join(map(short_name, last))}. Name `devices` whose last stages "
            "share a worker, or leave them out for an order that does."
        )


def make_logical_cpus(num_devices: int) -> None:
    """Splits the CPU into logical devices `CPU:0` ... `CPU:{num_devices - 1}`.

    Lets a pipeline of several stages run, and be tested, on a machine without
    accelerators. Call it before TensorFlow is first used.

    Args:
        num_devices: Number of logical devices, at least 1.

    Raises:
        ValueError: If `num_devices` is no integer from 1 to 4096.
        RuntimeError: If TensorFlow has started with another number of CPU devices.

    Example:

    >>> tfgpipe.make_logical_cpus(8)
    >>> len(tf.config.list_logical_devices("CPU"))
    8
    """
    argument_checks.check_count("num_devices", num_devices, most=4096)
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
        )
    except RuntimeError as error:
        existing = len(tf.config.list_logical_devices("CPU"))
        if existing == num_devices:
            return
        raise RuntimeError(
            "Logical devices must be made before TensorFlow is first used. Received "
            f"num_devices={num_devices} when TensorFlow had already started with "
            f"{existing}. Call `tfgpipe.make_logical_cpus({num_devices})` right after "
            "the imports, before any tensor, layer or device list."
        ) from error


def _check_workers(devices: Sequence[str], workers: range) -> None:
    """Raises ValueError if devices are of the workers of other replicas."""
    for device in devices:
        if (
            not is_remote(device)
            or tf.DeviceSpec.from_string(device).task not in workers
        ):
            raise ValueError(
                "The devices of this replica are those of workers "
                f"{workers.start} to {workers.stop - 1}. Received "
                f"{short_name(device)}. Name devices of its own workers."
            )


def _spread_over_workers(
    workers: list[list[str]], num_stages: int, num_replicas: int, num_shards: int
) -> list[str]:
    """Returns devices of a mesh: stages spread evenly over workers, in order.

    The replicas of a stage are on one worker, where their gradients are summed.

    Raises:
        ValueError: If a worker has too few.
    """
    free = [iter(names) for names in workers]
    stages, size = [], num_replicas * num_shards
    for k in range(num_stages):
        worker = k * min(len(workers), num_stages) // num_stages
        stages.append(list(itertools.islice(free[worker], size)))
        if len(stages[-1]) < size:
            each = -(-num_stages // len(workers)) * size
            raise ValueError(
                f"{num_stages} stages x {num_replicas} replicas x {num_shards} shards "
                f"over {len(workers)} workers need {each} devices on each. Received "
                f"{len(workers[worker])} on "
                f"{short_name(workers[worker][0]).partition('/')[0]}. Start the "
                f"workers with --devices={each}, or name `devices`."
            )
    by_stage = np.reshape(stages, (num_stages, num_replicas, num_shards))
    return by_stage.swapaxes(0, 1).ravel().tolist()
