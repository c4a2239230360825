"""Private TensorFlow API: the kernels that are registered for an operation.

TensorFlow's packages for Linux are built with CUDA: kernels for GPUs are registered
whether or not there is one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.python.framework import kernels


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What runs an operation on a type of device.

    Attributes:
        device: `CPU`, `GPU`, or `DEFAULT` for any.
        types: For attributes of the operation the types, by their enumeration, that
            it is for.
        host_arguments: Names of inputs and outputs that are in the host's memory.
        priority: Of several the one with most is taken.
    """

    device: str
    types: Mapping[str, frozenset[int]]
    host_arguments: frozenset[str]
    priority: int


@functools.cache
def registered_kernels(op: str) -> tuple[Kernel, ...]:
    """Returns the kernels for a type of operation."""
    return tuple(
        Kernel(
            each.device_type,
            {c.name: frozenset(c.allowed_values.list.type) for c in each.constraint},
            frozenset(each.host_memory_arg),
            each.priority,
        )
        for each in kernels.get_registered_kernels_for_op(op).kernel
    )


def kernel_for(node: tf.compat.v1.NodeDef, device: str) -> Kernel | None:
    """Returns the kernel that runs an operation on a type of device, or None.

    Args:
        node: The operation.
        device: The type, such as `GPU`.
    """
    found = [
        kernel
        for kernel in registered_kernels(node.op)
        if kernel.device in (device, "DEFAULT")
        and all(_types(node, name) <= types for name, types in kernel.types.items())
    ]
    # As TensorFlow has it: those of the device itself before those of any.
    return max(
        found,
        key=lambda kernel: (kernel.device == device, kernel.priority),
        default=None,
    )


def _types(node: tf.compat.v1.NodeDef, attribute: str) -> frozenset[int]:
    value = node.attr[attribute]
    return frozenset(value.list.type or [value.type])
