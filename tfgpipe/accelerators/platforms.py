"""Accelerators that can be compiled for: the planner's device, and a compiler's target.

Memory, peaks and links are those of the planner's table. A compiler is told more of a
GPU than the planner knows: multiprocessors, caches, limits of a block. These are the
figures of NVIDIA's CUDA programming guide and architecture white papers, in the format
of XLA's `GpuTargetConfigProto`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Literal

from tfgpipe.planner import TABLE, Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuTarget:
    """The description of a TPU for libtpu.

    Attributes:
        version: Its version as libtpu writes it.
        slices: The shapes of slices, small ones first.
        options: More arguments of the topology.
    """

    version: str
    slices: tuple[tuple[int, ...], ...]
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """The description of an NVIDIA GPU for XLA, beside its memory.

    Attributes:
        name: Its name as the driver gives it.
        compute_capability: Major and minor.
        accelerated: True to allow instructions of this architecture alone.
        num_multiprocessors: Streaming multiprocessors.
        num_fpus: Units for float32 of each.
        clock_ghz: The boost clock.
        l2_bytes: The second-level cache.
        shared_bytes: Shared memory of a multiprocessor.
    """

    name: str
    compute_capability: tuple[int, int]
    accelerated: bool
    num_multiprocessors: int
    num_fpus: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int

    def text_proto(self, *, memory_bytes: float, bandwidth: float) -> str:
        """Returns XLA's `GpuTargetConfigProto`, as text.

        Args:
            memory_bytes: The memory of the GPU.
            bandwidth: Bytes a second that it reads or writes.
        """
        major, minor = self.compute_capability
        features = "ACCELERATED_FEATURES" if self.accelerated else "NONE"
        return f"""
gpu_device_info {{
  name: "{self.name}"
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {features}
  }}
  core_count: {self.num_multiprocessors}
  fpus_per_core: {self.num_fpus}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {int(memory_bytes)}
  memory_bandwidth: {int(bandwidth)}
  l2_cache_size: {self.l2_bytes}
  shared_memory_per_core: {self.shared_bytes}
  shared_memory_per_block: {48 * _KIB}
  shared_memory_per_block_optin: {self.shared_bytes - _KIB}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  driver_version: "{_CUDA}"
  runtime_version: "{_CUDA}"
  compile_time_toolkit_version: "{_CUDA}"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
    """An accelerator that can be compiled for.

    Attributes:
        name: Its name.
        device: The planner's row for it.
        target: Its description for its compiler.
    """

    name: str
    device: Device
    target: TpuTarget | GpuTarget

    @property
    def kind(self) -> Literal["gpu", "tpu"]:
        """The name of its compiler."""
        return "tpu" if isinstance(self.target, TpuTarget) else "gpu"

    @property
    def memory_bytes(self) -> float:
        """The memory of one."""
        return self.device.memory

    def topology(self, num_devices: int = 1) -> dict[str, str]:
        """Returns the arguments of JAX's `get_topology_desc`.

        Args:
            num_devices: Smallest number of devices.

        Raises:
            ValueError: If no slice has as many.
        """
        if isinstance(self.target, GpuTarget):
            shape = f"1x1x{num_devices}"
            config = self.target.text_proto(
                memory_bytes=self.device.memory, bandwidth=self.device.bandwidth
            )
            return {
                "platform": "cuda",
                "topology_name": shape,
                "topology": shape,
                "target_config": config,
            }
        for chips in self.target.slices:
            if math.prod(chips) >= num_devices:
                shape = "x".join(map(str, chips))
                name = f"{self.target.version}:{shape}"
                return {
                    "platform": "tpu",
                    "topology_name": name,
                    **self.target.options,
                }
        largest = math.prod(self.target.slices[-1])
        raise ValueError(
            f"The largest slice of {self.name} that is compiled for has {largest} "
            f"devices. Received {num_devices}."
        )


def find(name: str) -> Platform:
    """Returns the platform of a name.

    >>> tfgpipe.accelerators.find("h100-80g").memory_bytes / 2**30
    80.0

    Args:
        name: As in `PLATFORMS`.

    Raises:
        ValueError: If there is none; those there are, are named.
    """
    if name in PLATFORMS:
        return PLATFORMS[name]
    near = difflib.get_close_matches(name, PLATFORMS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"There are compilers for {', '.join(PLATFORMS)}. Received {name!r}.{hint}"
    )


def roofline_seconds(
    flops: float, num_bytes: float, platform: Platform, *, dtype: str = "bfloat16"
) -> float:
    """Returns the least time that a platform's data sheet allows.

    That is the longer of computing at the peak and moving bytes at the bandwidth of the
    memory. Real ones are slower.

    >>> v5e = tfgpipe.accelerators.find("tpu-v5e")
    >>> tfgpipe.accelerators.roofline_seconds(197e12, 819e9 / 2, v5e)
    1.0

    Args:
        flops: Floating point operations.
        num_bytes: Bytes read and written.
        platform: The platform.
        dtype: The type of the products, whose peak is taken.
    """
    device = platform.device
    return max(flops / device.peak(dtype), num_bytes / device.bandwidth)


_KIB = 2**10
_MIB = 2**20
_CUDA = "12.8.0"
# 2D tori of v5e and v6e, 3D ones of v4 and v5p.
_FLAT = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_DEEP = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8))


def _a100(memory: str) -> GpuTarget:
    return GpuTarget(
        name=f"NVIDIA A100-SXM4-{memory}",
        compute_capability=(8, 0),
        accelerated=False,
        num_multiprocessors=108,
        num_fpus=64,
        clock_ghz=1.41,
        l2_bytes=40 * _MIB,
        shared_bytes=164 * _KIB,
    )


def _hopper(name: str) -> GpuTarget:
    return GpuTarget(
        name=f"NVIDIA {name}",
        compute_capability=(9, 0),
        accelerated=True,
        num_multiprocessors=132,
        num_fpus=128,
        clock_ghz=1.98,
        l2_bytes=50 * _MIB,
        shared_bytes=228 * _KIB,
    )


def _platform(name: str, device: str, target: TpuTarget | GpuTarget) -> Platform:
    return Platform(name=name, device=TABLE[device], target=target)


_PLATFORMS = (
    # Both cores of a chip are one device, as on Google's machines.
    _platform(
        "tpu-v4",
        "tpu-v4-32g",
        TpuTarget(version="v4", slices=_DEEP, options={"chip_config_name": "megacore"}),
    ),
    _platform("tpu-v5e", "tpu-v5e-16g", TpuTarget(version="v5e", slices=_FLAT)),
    _platform("tpu-v5p", "tpu-v5p-95g", TpuTarget(version="v5p", slices=_DEEP)),
    _platform("tpu-v6e", "tpu-v6e-32g", TpuTarget(version="v6e", slices=_FLAT)),
    _platform("a100-40g", "a100-40g", _a100("40GB")),
    _platform("a100-80g", "a100-80g", _a100("80GB")),
    _platform("h100-80g", "h100-80g", _hopper("H100 80GB HBM3")),
    _platform("h200-141g", "h200-141g", _hopper("H200")),
)
PLATFORMS: Mapping[str, Platform] = {each.name: each for each in _PLATFORMS}
"""The accelerators that can be compiled for."""
