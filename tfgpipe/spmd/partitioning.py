"""How tensors that are stacked over stages are computed: on K cores, or on one device.

A stacked tensor, `[K, ...]`, has a row for each stage. `map_rows` runs one function on
all rows. On cores row k is core k's, which runs the function once, on its own row. On
one device the function runs row after row, with the same results.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfgpipe._compat import spmd

RowFunction = Callable[..., list[tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Partitioning(abc.ABC):
    """The placement of the rows of stacked tensors.

    Attributes:
        num_rows: K.
    """

    num_rows: int

    @abc.abstractmethod
    def map_rows(self, function: RowFunction, *stacked: tf.Tensor) -> list[tf.Tensor]:
        """Returns the stacked results of a function on each row.

        Args:
            function: Takes a row of each tensor and returns a list of tensors.
            *stacked: Tensors `[K, ...]`.
        """

    @abc.abstractmethod
    def split(self, tensor: tf.Tensor, *, axis: int = 0) -> tf.Tensor:
        """Returns a tensor in K parts along an axis, each on one core."""

    @abc.abstractmethod
    def replicate(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor that each core has the whole of."""

    def split_batch(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor split along the first axis, if K divides it."""
        size = tensor.shape[0]
        if size is None or size % self.num_rows:
            return tensor
        return self.split(tensor)


class OneDevice(Partitioning):
    """All rows are on one device."""

    def map_rows(self, function: RowFunction, *stacked: tf.Tensor) -> list[tf.Tensor]:
        """Runs the function row after row."""
        rows = [function(*(x[k] for x in stacked)) for k in range(self.num_rows)]
        return [tf.stack(results) for results in zip(*rows, strict=True)]

    def split(self, tensor: tf.Tensor, *, axis: int = 0) -> tf.Tensor:
        """Returns the tensor as it is."""
        del axis
        return tensor

    def replicate(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor as it is."""
        return tensor


class Cores(Partitioning):
    """Row k is on core k, of a computation that XLA partitions over K cores."""

    def map_rows(self, function: RowFunction, *stacked: tf.Tensor) -> list[tf.Tensor]:
        """Runs the function once, on each core on its own row."""
        K = self.num_rows
        own = [spmd.enter_manual(self.split(x), num_parts=K) for x in stacked]
        results = function(*(tf.squeeze(row, 0) for row in own))
        return [
            self.split(spmd.leave_manual(row[tf.newaxis], num_parts=K))
            for row in results
        ]

    def split(self, tensor: tf.Tensor, *, axis: int = 0) -> tf.Tensor:
        """Annotates the tensor as split."""
        return spmd.split(tensor, num_parts=self.num_rows, axis=axis)

    def replicate(self, tensor: tf.Tensor) -> tf.Tensor:
        """Annotates the tensor as replicated."""
        return spmd.replicate(tensor)
