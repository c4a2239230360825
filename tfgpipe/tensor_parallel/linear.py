"""Products with a matrix whose columns, or whose rows, are on T devices.

    columns   x -> every device,  y_t = x W_t        y is sharded, [..., units / T]
    rows      x_t is sharded,     y = sum x_t W_t    y is full, or sharded again

Columns then rows need no exchange between the two (Shoeybi et al. 2019, "Megatron-LM",
section 3). What is exchanged goes through the first device, or around a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeGuard, cast

import keras
import tensorflow as tf

from tfgpipe.tensor_parallel import device_ops, ring

Collective = Literal["gather", "ring", "bidirectional_ring"]
# The directions in which chunks go round the ring.
DIRECTIONS: dict[Collective, tuple[int, ...]] = {
    "gather": (),
    "ring": (1,),
    "bidirectional_ring": (1, -1),
}
# The parts of a tensor along the last axis, each on its device.
Parts: TypeAlias = Sequence[tf.Tensor]
# A full tensor on the first device, or one that is sharded.
MaybeSharded: TypeAlias = tf.Tensor | Parts


def is_sharded(x: Any) -> TypeGuard[Parts]:
    """Returns whether it is the parts of a tensor rather than the tensor."""
    return isinstance(x, (tuple, list))


def width(shape: Any) -> int:
    """Returns the size of the last axis of a tensor, full or sharded, by its shape."""
    return sum(s[-1] for s in shape) if is_sharded(shape[0]) else shape[-1]


def outer(shape: Any) -> tuple[int | None, ...]:
    """Returns the sizes of the other axes."""
    return tuple(shape[0][:-1] if is_sharded(shape[0]) else shape[:-1])


def full(x: MaybeSharded, devices: Sequence[str]) -> tf.Tensor:
    """Returns the full tensor, on the first device."""
    return device_ops.gather(x, devices[0]) if is_sharded(x) else x


def scatter(x: MaybeSharded, devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns the parts of a tensor, each on its device."""
    if is_sharded(x):
        return list(x)
    return device_ops.on_each(devices, tf.identity, parts(x, devices))


def parts(x: MaybeSharded, devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns the parts of a tensor: of a full one, on the first device still.

    Their sizes differ by one at most.
    """
    if is_sharded(x):
        return list(x)
    width = cast(tf.Tensor, x).shape[-1]
    sizes = device_ops.part_sizes(width, len(devices))
    return device_ops.split(x, devices[0], sizes)


def column(
    x: MaybeSharded, kernels: Parts, devices: Sequence[str], collective: Collective
) -> list[tf.Tensor]:
    """Returns `x @ kernels[t]` on each device t.

    Args:
        x: `[..., d]`, full or sharded.
        kernels: On each device, its columns, `[d, units_t]`.
        devices: T devices.
        collective: The collective that brings x to every device.
    """
    directions = DIRECTIONS[collective]
    if directions:
        return ring.column(parts(x, devices), kernels, devices, directions)
    copies = device_ops.copy(full(x, devices), devices[0], len(devices))
    return device_ops.on_each(devices, keras.ops.matmul, copies, kernels)


def row(
    x: MaybeSharded, kernels: Parts, devices: Sequence[str], collective: Collective
) -> MaybeSharded:
    """Returns the sum over t of `x[t] @ kernels[t]`: sharded off a ring, else full.

    Args:
        x: `[..., d]`, full or sharded.
        kernels: On each device, its rows, `[d_t, units]`.
        devices: T devices.
        collective: The collective that sums products.
    """
    x = parts(x, devices)
    directions = DIRECTIONS[collective]
    if directions:
        return ring.row(x, kernels, devices, directions)
    products = device_ops.on_each(devices, keras.ops.matmul, x, kernels)
    return device_ops.reduce(products, devices[0])
