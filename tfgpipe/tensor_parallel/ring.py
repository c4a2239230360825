r"""Ring products: chunks move from device to device while chunks multiply.

A product with a matrix whose columns are on T devices needs all of x on each. Sent by
one device, that is T times x through one link before anyone starts. On a ring each
device starts with the chunk of x it has, and hands it on while it multiplies:

               step 0          step 1          step 2          step 3
    device 0   x0 W00          x3 W30          x2 W20          x1 W10     ->  y0
    device 1   x1 W11   \x0    x0 W01   \x3    x3 W31   \x2    x2 W21     ->  y1
    device 2   x2 W22   \x1    x1 W12   \x0    x0 W02   \x3    x3 W32     ->  y2
    device 3   x3 W33   \x2    x2 W23   \x1    x1 W13   \x0    x0 W03     ->  y3

`x_c` are columns of x, `W_ct` the rows of device t's columns of W that they meet. Each
link carries one chunk at a time, under the product of the chunk before.

The other way round is a product whose rows are on T devices: what moves is the sum of
chunk c of the result, to which each device adds its product, until it arrives at
device c. One is the gradient of the other, so the backward pass is a ring as well, in
the opposite direction. (The decomposition of Wang et al. 2023, "Overlap Communication
with Dependent Computation via Decomposition in Large Deep Learning Models".)

On a bidirectional ring half of each chunk goes round in each direction, which uses both
directions of every link and halves the time that a chunk takes to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.tensor_parallel import device_ops
from tfgpipe.tensor_parallel.device_ops import copy, on

Rows = Sequence[Sequence[tf.Tensor]]


def gather_multiply(
    chunks: Sequence[tf.Tensor], kernels: Rows, devices: Sequence[str], step: int
) -> list[tf.Tensor]:
    """Returns on each device t the sum over c of `chunks[c] @ kernels[t][c]`.

    Args:
        chunks: Parts of x along its last axis, `[..., d_c]`, chunk c for device c.
        kernels: By device, by chunk, `[d_c, units_t]`.
        devices: The devices in the order of the ring.
        step: 1 for one direction of the ring, -1 for the other.
    """
    T = len(devices)
    here: list[Any] = list(chunks)
    sums: list[list[tf.Tensor]] = [[] for _ in devices]
    for s in range(T):
        onward = [None] * T
        for t, device in enumerate(devices):
            chunk, *rest = copy(here[t], device, 1 if s == T - 1 else 2)
            kernel = kernels[t][(t - s * step) % T]
            sums[t] = [on(device, _multiply, chunk, kernel, *sums[t])]
            onward[(t + step) % T] = rest[0] if rest else None
        here = onward
    return [total for (total,) in sums]


def multiply_scatter(
    parts: Sequence[tf.Tensor], kernels: Rows, devices: Sequence[str], step: int
) -> list[tf.Tensor]:
    """Returns on each device c the sum over t of `parts[t] @ kernels[t][c]`.

    Args:
        parts: The part of each device, `[..., d_t]`.
        kernels: By device, by chunk of the result, `[d_t, units_c]`.
        devices: The devices in the order of the ring.
        step: 1 for one direction of the ring, -1 for the other.
    """
    T = len(devices)
    copies = [copy(x, device, T) for x, device in zip(parts, devices, strict=True)]
    moving: list[list[tf.Tensor]] = [[] for _ in devices]
    for s in range(T):
        onward: list[list[tf.Tensor]] = [[] for _ in devices]
        for t, device in enumerate(devices):
            kernel = kernels[t][(t - (s + 1) * step) % T]
            total = on(device, _multiply, copies[t][s], kernel, *moving[t])
            onward[(t + step) % T if s < T - 1 else t] = [total]
        moving = onward
    return [total for (total,) in moving]


def column(
    chunks: Sequence[tf.Tensor],
    kernels: Sequence[tf.Tensor],
    devices: Sequence[str],
    directions: Sequence[int],
) -> list[tf.Tensor]:
    """Returns `x @ kernels[t]` on each device t, in one or both directions.

    Chunk c is a part of x along its last axis, for device c; `kernels[t]` has the
    columns of device t, `[d, units_t]`.
    """
    widths = [chunk.shape[-1] for chunk in chunks]
    split = [device_ops.part_sizes(width, len(directions)) for width in widths]
    halves = list(map(device_ops.split, chunks, devices, split))
    flat = [size for sizes in split for size in sizes]
    rows = [
        device_ops.split(kernel, device, flat, axis=0)
        for kernel, device in zip(kernels, devices, strict=True)
    ]
    n = len(directions)
    results = [
        gather_multiply([h[i] for h in halves], [r[i::n] for r in rows], devices, step)
        for i, step in enumerate(directions)
    ]
    if n == 1:
        return results[0]
    return list(map(device_ops.reduce, zip(*results, strict=True), devices))


def row(
    parts: Sequence[tf.Tensor],
    kernels: Sequence[tf.Tensor],
    devices: Sequence[str],
    directions: Sequence[int],
) -> list[tf.Tensor]:
    """Returns the sum over t of `parts[t] @ kernels[t]`, a part on each device.

    `parts[t]` is `[..., d_t]`; `kernels[t]` has the rows of device t, `[d_t, units]`.
    """
    n = len(directions)
    widths = device_ops.part_sizes(kernels[0].shape[-1], len(devices))
    flat = [size for width in widths for size in device_ops.part_sizes(width, n)]
    columns = [
        device_ops.split(kernel, device, flat)
        for kernel, device in zip(kernels, devices, strict=True)
    ]
    copies = [copy(x, device, n) for x, device in zip(parts, devices, strict=True)]
    results = [
        multiply_scatter([c[i] for c in copies], [c[i::n] for c in columns], devices, s)
        for i, s in enumerate(directions)
    ]
    if n == 1:
        return results[0]
    return list(map(device_ops.gather, zip(*results, strict=True), devices))


def _multiply(x: tf.Tensor, kernel: tf.Tensor, *sums: tf.Tensor) -> tf.Tensor:
    """Returns a product, added to a sum if there is one, which may still be moving."""
    product = keras.ops.matmul(x, kernel)
    return tf.add_n([*sums, product]) if sums else product
