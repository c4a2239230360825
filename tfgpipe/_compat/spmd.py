"""Private TensorFlow API: annotations for XLA's SPMD partitioner.

The partitioner makes of one computation a program that all cores run, each on its part
of the tensors. Annotations say how tensors are split; collectives follow from them.
Between `enter_manual` and `leave_manual` a computation is written for one core, on its
part alone. Where nothing is partitioned XLA ignores annotations, but not these two;
outside XLA none of them has a kernel.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tensorflow.python.compiler.xla.experimental import xla_sharding


def split(tensor: tf.Tensor, *, num_parts: int, axis: int = 0) -> tf.Tensor:
    """Returns a tensor that is split over the cores along an axis.

    Args:
        tensor: What to split.
        num_parts: The number of cores, which divides the axis.
        axis: Which axis.
    """
    return _tiles(tensor.shape.rank, num_parts, axis).apply_to_tensor(
        tensor, use_sharding_op=True
    )


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor that all cores have the whole of."""
    return xla_sharding.replicate(tensor, use_sharding_op=True)


def enter_manual(tensor: tf.Tensor, *, num_parts: int) -> tf.Tensor:
    """Returns a core's own part of a tensor that is split along the first axis.

    Args:
        tensor: What is split, `[num_parts * n, ...]`.
        num_parts: The number of cores.
    """
    tiles = _tiles(tensor.shape.rank, num_parts, 0)
    return xla_sharding.auto_to_manual_spmd_partition(
        tensor, tiles.proto.SerializeToString()
    )


def leave_manual(part: tf.Tensor, *, num_parts: int) -> tf.Tensor:
    """Returns the whole tensor that cores have parts of, split along the first axis.

    Args:
        part: A core's own part, `[n, ...]`.
        num_parts: The number of cores.
    """
    rows, *rest = part.shape
    tiles = _tiles(part.shape.rank, num_parts, 0)
    return xla_sharding.manual_to_auto_spmd_partition(
        part, tiles.proto.SerializeToString(), [num_parts * rows, *rest]
    )


def _tiles(rank: int, num_parts: int, axis: int) -> xla_sharding.Sharding:
    grid = np.arange(num_parts).reshape(
        [num_parts if i == axis else 1 for i in range(rank)]
    )
    return xla_sharding.Sharding.tile(grid)
