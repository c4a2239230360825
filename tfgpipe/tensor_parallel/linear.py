"""Products with a matrix whose columns, or whose rows, are on T devices.

    columns   x -> every device,  y_t = x W_t        y is in parts, [..., units / T]
    rows      x_t is in parts,    y = sum x_t W_t    y is whole, or in parts again

Column then row needs no exchange between the two (Shoeybi et al. 2019, "Megatron-LM",
section 3). An exchange is a copy, a gathering or a sum on the first device, or a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe._util import check_choice
from tfgpipe.tensor_parallel import places, ring

Mode = Literal["sync", "ring"]
Ring = Literal["one_way", "both_ways"]
# A tensor on the first device, or its parts along the last axis, each on its device.
Parts = Sequence[tf.Tensor]
WholeOrParts = Any


def directions(mode: Mode, ways: Ring) -> tuple[int, ...]:
    """Returns the ways round the ring that chunks go: none without a ring.

    Raises:
        ValueError: If an argument is none of the choices.
    """
    check_choice("mode", mode, ("sync", "ring"))
    check_choice("ring", ways, ("one_way", "both_ways"))
    return () if mode == "sync" else (1,) if ways == "one_way" else (1, -1)


def in_parts(x: WholeOrParts) -> bool:
    """Returns whether it is the parts of a tensor rather than the tensor."""
    return isinstance(x, (tuple, list))


def whole(x: WholeOrParts, devices: Sequence[str]) -> tf.Tensor:
    """Returns a tensor whole, on the first device."""
    return places.join(x, devices[0]) if in_parts(x) else x


def scattered(x: WholeOrParts, devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns the parts of a tensor, each on its device."""
    if in_parts(x):
        return list(x)
    pieces = zip(devices, parts(x, devices), strict=True)
    return [places.on(device, tf.identity, piece) for device, piece in pieces]


def parts(x: WholeOrParts, devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns the parts of a tensor: of one that is whole, on the first device still.

    Their sizes differ by one at most.
    """
    if in_parts(x):
        return list(x)
    return places.split(x, devices[0], places.sizes(x.shape[-1], len(devices)))


def column(
    x: WholeOrParts, kernels: Parts, devices: Sequence[str], ways: Sequence[int]
) -> list[tf.Tensor]:
    """Returns `x @ kernels[t]` on each device t.

    Args:
        x: `[..., d]`, whole or in parts.
        kernels: On each device, its columns, `[d, units_t]`.
        devices: T devices.
        ways: What `directions` returned.
    """
    if ways:
        return ring.column(parts(x, devices), kernels, devices, ways)
    copies = places.fork(whole(x, devices), devices[0], len(devices))
    return _products(copies, kernels, devices)


def row(
    x: WholeOrParts, kernels: Parts, devices: Sequence[str], ways: Sequence[int]
) -> WholeOrParts:
    """Returns the sum over t of `x[t] @ kernels[t]`: in parts off a ring, else whole.

    Args:
        x: `[..., d]`, whole or in parts.
        kernels: On each device, its rows, `[d_t, units]`.
        devices: T devices.
        ways: What `directions` returned.
    """
    x = parts(x, devices)
    if ways:
        return ring.row(x, kernels, devices, ways)
    return places.add(_products(x, kernels, devices), devices[0])


def _products(x: Parts, kernels: Parts, devices: Sequence[str]) -> list[tf.Tensor]:
    return [
        places.on(device, keras.ops.matmul, a, kernel)
        for device, a, kernel in zip(devices, x, kernels, strict=True)
    ]
