"""TPU slices that are not there: computations for them can be traced, not run.

Variables on core `i` of such a slice are on `CPU:i`, of which the tests have eight.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.helpers.tpu_slices import SLICES


class Topology(tf.tpu.experimental.Topology):
    """A slice whose cores TensorFlow finds among the CPUs.

    Args:
        shape: Chips along x, y and z, and cores a chip.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        everywhere = np.argwhere(np.ones(shape, bool))
        super().__init__(mesh_shape=shape, device_coordinates=[everywhere])

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Any, job: str | None = None
    ) -> str:
        """Returns the CPU that stands for a core."""
        number = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return f"/job:{job}/task:0/device:CPU:{number}"


@dataclasses.dataclass(frozen=True)
class _Device:
    name: str


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """What a strategy asks of a TPU system."""

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    devices: list[_Device]


class Resolver(tf.distribute.cluster_resolver.TPUClusterResolver):
    """Finds a slice that is not there."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores

    def get_tpu_system_metadata(self) -> Any:
        """Returns numbers and names of the cores."""
        name = "/job:localhost/replica:0/task:0/device:TPU:{}"
        devices = [_Device(name.format(i)) for i in range(self._num_cores)]
        return _Metadata(self._num_cores, 1, self._num_cores, devices)


def cores(name: str) -> list[tuple[int, ...]]:
    """Returns the coordinates of the cores of one of `SLICES`, as they are counted."""
    return list(itertools.product(*map(range, SLICES[name])))


def operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the operations of a graph and of all functions that it calls."""
    yield from graph.get_operations()
    for name in {
        attr.func.name
        for node in graph.as_graph_def().node
        for attr in node.attr.values()
        if attr.func.name
    }:
        yield from operations(graph._get_function(name).graph)


def captured(tensor: tf.Tensor) -> tf.Tensor:
    """Returns what an argument of a function stands for outside of all functions."""
    while not hasattr(tensor, "numpy"):
        outer = {inner.name: outer for outer, inner in tensor.graph.captures}
        if tensor.name not in outer:
            break
        tensor = outer[tensor.name]
    return tensor
