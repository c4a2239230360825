"""All-reduce of tensors over replicas, in plain TensorFlow operations.

    reduce    all are sent to one device, and the sum from there to all
    ring      each is split into D chunks; chunk c goes around once as a partial sum and
              once as the sum, so that every link carries 2 (D - 1) / D of a tensor

Both give the same numbers on all devices, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import tensorflow as tf

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"
AllReduce = Literal["reduce", "ring", "nccl"]
ALL_REDUCES: tuple[AllReduce, ...] = ("reduce", "ring", "nccl")


def reduce_to(tensors: Sequence[Gradient], device: str) -> Gradient:
    """Returns the sum of tensors on one device.

    Rows of a weight that was indexed are put one behind the other.
    """
    with tf.device(device):
        if not any(isinstance(x, tf.IndexedSlices) for x in tensors):
            return tf.add_n([tf.identity(x) for x in tensors])
        slices = [_as_indexed_slices(x) for x in tensors]
        return tf.IndexedSlices(
            tf.concat([x.values for x in slices], axis=0),
            tf.concat([x.indices for x in slices], axis=0),
            slices[0].dense_shape,
        )


def all_reduce(
    tensors: Sequence[Gradient],
    devices: Sequence[str],
    *,
    algorithm: AllReduce,
    reducer: int = 0,
) -> list[Gradient]:
    """Returns the sum of tensors on each of their devices.

    Args:
        tensors: One of each replica.
        devices: Their devices.
        algorithm: `"reduce"` or `"ring"`.
        reducer: For `"reduce"`, the index of the device that adds up.
    """
    if len(tensors) == 1:
        return list(tensors)
    dense = all(isinstance(x, tf.Tensor) for x in tensors)
    large = (tensors[0].shape.num_elements() or 0) >= len(tensors)
    if algorithm == "ring" and dense and large:
        return _ring(tensors, devices)
    total = reduce_to(tensors, devices[reducer])
    return [total if d == reducer else copy_to(total, x) for d, x in enumerate(devices)]


def all_reduce_nccl(
    strategy: tf.distribute.Strategy, values: Sequence[tf.distribute.DistributedValues]
) -> list[list[Gradient]]:
    """Returns sums by NVIDIA's collectives, of each value one on each GPU."""
    sums = tf.distribute.NcclAllReduce().batch_reduce(
        tf.distribute.ReduceOp.SUM, [(value, value) for value in values]
    )
    return [list(strategy.experimental_local_results(total)) for total in sums]


def copy_to(tensor: Gradient, device: str) -> Gradient:
    """Returns a tensor on another device."""
    with tf.device(device):
        return tf.nest.map_structure(tf.identity, tensor, expand_composites=True)


def _ring(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    D, shape = len(tensors), tensors[0].shape
    size = math.prod(shape.as_list())
    sizes = [size * (c + 1) // D - size * c // D for c in range(D)]
    chunks = []
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            chunks.append(tf.split(tf.reshape(tensor, [-1]), sizes))
    # Once around, each chunk from another device on, so that all links are busy.
    for c in range(D):
        for step in range(1, D):
            d = (c + step) % D
            with tf.device(devices[d]):
                chunks[d][c] = chunks[d][c] + tf.identity(chunks[d - 1][c])
    # The sum of chunk c is on the device before the one it began on.
    for c in range(D):
        for step in range(D, 2 * D - 1):
            d = (c + step) % D
            with tf.device(devices[d]):
                chunks[d][c] = tf.identity(chunks[d - 1][c])
    sums = []
    for own, device in zip(chunks, devices, strict=True):
        with tf.device(device):
            sums.append(tf.reshape(tf.concat(own, axis=0), shape))
    return sums


def _as_indexed_slices(gradient: Gradient) -> tf.IndexedSlices:
    """Returns a gradient as rows of its weight."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.IndexedSlices(gradient, tf.range(tf.shape(gradient)[0]))
