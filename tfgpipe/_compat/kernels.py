"""Private TensorFlow API: the kernels that are registered for an operation.

TensorFlow's packages for Linux are built with CUDA: kernels for GPUs are registered
whether or not there is one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorflow.python.framework import kernels


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel: the implementation of an operation on a type of device.

    Attributes:
        device: `CPU`, `GPU`, or `DEFAULT` for any.
        types: Types that it is for, by their enumeration, for each attribute of the
            operation.
        host_arguments: Names of inputs and outputs that are in the host's memory.
        priority: Rank among several; the highest is taken.
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


def operations_with_kernels() -> list[str]:
    """Returns the types of operations that have a kernel."""
    return sorted({each.op for each in kernels.get_all_registered_kernels().kernel})


def kernel_for(
    node: tf.compat.v1.NodeDef,
    device: str,
    there: Mapping[str, Sequence[Kernel]] | None = None,
) -> Kernel | None:
    """Returns the kernel that runs an operation on a type of device, or None.

    Args:
        node: The operation.
        device: The type, such as `GPU`.
        there: Kernels by operation. Defaults to those of the TensorFlow installed.
    """
    known = registered_kernels(node.op) if there is None else there.get(node.op, ())
    found = [
        kernel
        for kernel in known
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
