"""The grid of devices a pipeline runs on: replicas down, stages across.

             stage 0   stage 1   stage 2
replica 0     GPU:0     GPU:1     GPU:2
replica 1     GPU:3     GPU:4     GPU:5
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A grid of TensorFlow device names, `grid[replica][stage]`."""

    grid: tuple[tuple[str, ...], ...]

    @property
    def num_replicas(self) -> int:
        """D, the number of rows."""
        return len(self.grid)

    @property
    def num_stages(self) -> int:
        """K, the number of columns."""
        return len(self.grid[0])

    @property
    def placement(self) -> tuple[int, ...]:
        """For each stage, the number of its device among those of its replica."""
        first = self.grid[0]
        devices = list(dict.fromkeys(first))
        return tuple(map(devices.index, first))

    def stage(self, k: int) -> tuple[str, ...]:
        """Returns the devices of stage `k`, one a replica."""
        return tuple(replica[k] for replica in self.grid)


def make_mesh(
    *,
    num_stages: int,
    num_replicas: int = 1,
    devices: Sequence[str] | None = None,
) -> Mesh:
    """Lays devices out as a mesh, stages of one replica next to each other.

    Args:
        num_stages: K, the number of stages.
        num_replicas: D, the number of copies of the pipeline.
        devices: Device names such as `"GPU:0"`, at least K * D of them. Defaults to
            the visible GPUs, or without GPUs the logical CPUs.

    Raises:
        ValueError: If there are too few devices, or one is named that does not exist.
    """
    visible = _visible()
    if devices is None:
        names = default_devices()
    else:
        names = [_full_name(device) for device in devices]
        unknown = [d for d, n in zip(devices, names, strict=True) if n not in visible]
        if unknown:
            raise ValueError(
                "`devices` must name devices that TensorFlow sees. Received "
                f"{', '.join(unknown)}; TensorFlow sees {', '.join(visible)}. "
                + _advice(num_stages * num_replicas)
            )
    if len(names) < num_stages * num_replicas:
        raise ValueError(
            f"{num_stages} stages x {num_replicas} replicas need "
            f"{num_stages * num_replicas} devices, one each. Received {len(names)}: "
            f"{', '.join(names)}. " + _advice(num_stages * num_replicas)
        )
    return Mesh(
        tuple(
            tuple(names[d * num_stages : (d + 1) * num_stages])
            for d in range(num_replicas)
        )
    )


def make_logical_cpus(num_devices: int) -> None:
    """Splits the CPU into logical devices `CPU:0` ... `CPU:{num_devices - 1}`.

    Lets a pipeline of several stages run, and be tested, on a machine without
    accelerators. Call it before TensorFlow is first used.

    Args:
        num_devices: How many logical devices to make, at least 1.

    Raises:
        ValueError: If `num_devices` is below 1.
        RuntimeError: If TensorFlow has started with another number of CPU devices.
    """
    if num_devices < 1:
        raise ValueError(f"`num_devices` must be at least 1. Received {num_devices}.")
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


def kind(device: str) -> str:
    """Returns `"CPU"`, `"GPU"` or `"TPU"` for a device name."""
    return tf.DeviceSpec.from_string(device).device_type


def host(device: str) -> str:
    """Returns the CPU of the machine that a device is in.

    >>> host("/job:localhost/replica:0/task:0/device:GPU:1")
    '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    cpu = tf.DeviceSpec(device_type="CPU", device_index=0)
    return tf.DeviceSpec.from_string(device).make_merged_spec(cpu).to_string()


def short_name(device: str) -> str:
    """Returns `"GPU:0"` for `"/job:localhost/replica:0/task:0/device:GPU:0"`."""
    return device.rsplit("device:", 1)[-1]


def token(name: str) -> tf.Tensor:
    """Returns a resource that stands for an order of operations, and holds nothing.

    Args:
        name: What is ordered. Tokens of one name on one device are the same.
    """
    with tf.control_dependencies(None):
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(), shared_name=name)


def default_devices() -> list[str]:
    """Returns the devices a mesh has to choose from when none are named."""
    return _visible("GPU") or _visible("CPU")


def _visible(device_type: str | None = None) -> list[str]:
    devices = tf.config.list_logical_devices(device_type)
    return [_full_name(device.name) for device in devices]


def _full_name(device: str) -> str:
    """Completes `"GPU:0"` to the form in which TensorFlow reports a tensor's device.

    >>> _full_name("gpu:1")
    '/job:localhost/replica:0/task:0/device:GPU:1'
    """
    if "/job:" in device:
        return device
    kind, _, index = short_name(device).lstrip("/").upper().partition(":")
    return f"/job:localhost/replica:0/task:0/device:{kind}:{index or 0}"


def _advice(num_devices: int) -> str:
    return (
        "Use fewer stages, or make logical devices before TensorFlow starts: "
        f"`tfgpipe.make_logical_cpus({num_devices})`."
    )
