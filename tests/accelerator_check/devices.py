"""The devices of a check: GPUs, logical ones of a single GPU, or logical CPUs."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import tensorflow as tf

import tfgpipe
from tfgpipe.accelerators import PLATFORMS

NUM_LOGICAL = 4
MAX_DEVICES = 4
# Of a GPU that is divided, what its libraries need.
_RESERVED = 0.15
_FILE = "machine.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What the parts of a check run on.

    Attributes:
        kind: The kind of its devices.
        devices: Their names, as a pipeline takes them; at most four.
        num_physical: How many there really are.
        name: The name of a GPU, or an empty text.
        memory_bytes: The memory of a physical GPU, 0 if not known.
        platform: Which of `tfgpipe.accelerators.PLATFORMS` that is, or None.
        quick: Whether models are small and cases few.
    """

    kind: Literal["CPU", "GPU", "TPU"]
    devices: list[str]
    num_physical: int
    name: str = ""
    memory_bytes: float = 0
    platform: str | None = None
    quick: bool = True

    @property
    def is_divided(self) -> bool:
        """Whether its devices are parts of one."""
        return self.num_physical < len(self.devices)

    def write(self, folder: Path) -> None:
        """Writes it for processes that do not see its GPUs."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / _FILE).write_text(text, "utf-8")


def read_machine(folder: Path) -> Machine | None:
    """Returns what `Machine.write` has written, or None."""
    path = folder / _FILE
    return Machine(**json.loads(path.read_text("utf-8"))) if path.exists() else None


def start(*, quick: bool) -> Machine:
    """Starts TensorFlow on the devices that there are.

    Args:
        quick: Whether models are to be small; on CPUs they are.
    """
    if tpus := tf.config.list_physical_devices("TPU"):
        return Machine(kind="TPU", devices=[], num_physical=len(tpus), quick=quick)
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        tfgpipe.make_logical_cpus(NUM_LOGICAL)
        devices = [f"CPU:{i}" for i in range(NUM_LOGICAL)]
        return Machine(kind="CPU", devices=devices, num_physical=1)
    details = tf.config.experimental.get_device_details(gpus[0])
    name, memory = str(details.get("device_name", "")), _memory_bytes()
    if len(gpus) == 1:
        each = (1 - _RESERVED) * (memory or 8 * 2**30) / NUM_LOGICAL / 2**20
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=int(each))
        tf.config.set_logical_device_configuration(gpus[0], [limit] * NUM_LOGICAL)
    else:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    found = tf.config.list_logical_devices("GPU")[:MAX_DEVICES]
    return Machine(
        kind="GPU",
        devices=[f"GPU:{i}" for i in range(len(found))],
        num_physical=len(gpus),
        name=name,
        memory_bytes=memory,
        platform=platform_of(name, memory),
        quick=quick,
    )


def platform_of(
    name: str, memory_bytes: float, *, among: Collection[str] = tuple(PLATFORMS)
) -> str | None:
    """Returns the platform of a GPU, by its model and the nearest memory.

    >>> platform_of("NVIDIA A100-SXM4-80GB", 79.2 * 2**30)
    'a100-80g'
    >>> platform_of("NVIDIA H100 PCIe", 79.6 * 2**30)
    'h100-80g'
    >>> platform_of("Tesla T4", 15 * 2**30)

    Args:
        name: Its name as the driver gives it.
        memory_bytes: Its memory; 0 if not known.
        among: The names of platforms.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    alike = [each for each in among if each.partition("-")[0] in words]
    return min(
        alike,
        key=lambda each: abs(PLATFORMS[each].memory_bytes - memory_bytes),
        default=None,
    )


def nvidia_smi(query: str) -> list[str]:
    """Returns what `nvidia-smi` says of each GPU, nothing if it is not there."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return run.stdout.splitlines() if run.returncode == 0 else []


def _memory_bytes() -> float:
    found = [x for x in nvidia_smi("memory.total") if x.strip().isdigit()]
    return min((float(x) * 2**20 for x in found), default=0.0)
