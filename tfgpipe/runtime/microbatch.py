"""Splits a mini-batch into microbatches; joins their results.

A mini-batch of B rows becomes M microbatches of B // M or B // M + 1 rows, the larger
ones first. Rows keep their order. When B is known only at run time the sizes are
tensors, and if B < M the last M - B microbatches have no rows at all; stage functions
skip those (see `tfgpipe.stage.empty_batches`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

# A number of rows: known when the graph is built, or only when it runs.
NumRows: TypeAlias = "int | tf.Tensor"


@dataclasses.dataclass(frozen=True)
class Split:
    """The division of one mini-batch into microbatches.

    Attributes:
        sizes: Rows of each microbatch.
        batch_size: Rows of the mini-batch.
    """

    sizes: tuple[NumRows, ...]
    batch_size: NumRows

    @property
    def static_size(self) -> int | None:
        """The size of every microbatch, if known and equal, else None."""
        first = self.sizes[0]
        if isinstance(first, int) and all(size == first for size in self.sizes):
            return first
        return None

    @property
    def may_be_empty(self) -> bool:
        """True if some microbatch could turn out to have no rows."""
        return not isinstance(self.batch_size, int) or self.batch_size == 0

    def batch_fraction(self, m: int, dtype: tf.DType) -> tf.Tensor:
        """Returns the fraction of the mini-batch's rows that are in microbatch `m`."""
        total = tf.cast(self.batch_size, dtype)
        return tf.math.divide_no_nan(tf.cast(self.sizes[m], dtype), total)

    def spec(self, tensor: tf.Tensor) -> tf.TensorSpec:
        """Returns shape and type of the microbatches of a tensor `[B, ...]`."""
        return tf.TensorSpec([self.static_size, *tensor.shape[1:]], tensor.dtype)

    def split(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Splits `tensor` `[B, ...]` into M tensors `[b_m, ...]`."""
        if len(self.sizes) == 1:
            return [tensor]
        if self.static_size is not None:
            return tf.split(tensor, len(self.sizes))
        return tf.split(tensor, tf.stack(self.sizes), num=len(self.sizes))


def split_batch(
    tensor: tf.Tensor, num_microbatches: int, *, dynamic: bool = False
) -> Split:
    """Decides the sizes of the microbatches of a mini-batch `[B, ...]`.

    Args:
        tensor: The mini-batch.
        num_microbatches: M.
        dynamic: True to treat sizes as dynamic though they are known.
    """
    total = tensor.shape[0]
    if total is None or dynamic:
        total = tf.shape(tensor)[0]
        count = num_microbatches
    else:
        count = max(1, min(num_microbatches, total))
    quotient, remainder = total // count, total % count
    sizes = tuple(quotient + _as_integer(m < remainder) for m in range(count))
    return Split(sizes, total)


def join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins M tensors `[b_m, ...]` into one `[B, ...]`.

    A microbatch without rows has zero for every unknown size; it takes the sizes of
    the first one, which has the most rows.
    """
    if len(tensors) == 1:
        return tensors[0]
    first, *others = tensors
    if not first.shape[1:].is_fully_defined():
        sizes = tf.shape(first)[1:]
        others = [tf.reshape(t, tf.concat([[-1], sizes], 0)) for t in others]
        others = [
            tf.ensure_shape(t, o.shape)
            for t, o in zip(others, tensors[1:], strict=True)
        ]
    return tf.concat([first, *others], axis=0)


def _as_integer(condition: bool | tf.Tensor) -> NumRows:
    if isinstance(condition, bool):
        return int(condition)
    return tf.cast(condition, tf.int32)
