"""The chunks of a sequence that is in parts on T devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.tensor_parallel import device_ops


class Chunks:
    """The chunks of a sequence, and the devices that have them.

    Args:
        devices: The T devices.
        is_causal: True for 2 T chunks, of which none reads a later one.
    """

    def __init__(self, devices: Sequence[str], *, is_causal: bool) -> None:
        self._devices, self._is_causal = tuple(devices), is_causal
        self.num = len(devices) * (2 if is_causal else 1)

    def of(self, t: int) -> list[int]:
        """Returns the chunks of device t."""
        return [c for c in range(self.num) if self._owner(c) == t]

    def device(self, c: int) -> str:
        """Returns the device of a chunk."""
        return self._devices[self._owner(c)]

    def reads(self, r: int, c: int) -> bool:
        """Returns whether queries of chunk r attend to keys of chunk c."""
        return not self._is_causal or c <= r

    def is_diagonal(self, r: int, c: int) -> bool:
        """Returns whether of two chunks earlier keys alone are attended to."""
        return self._is_causal and c == r

    def num_read(self, r: int) -> int:
        """Returns the number of chunks that queries of chunk r attend to."""
        return sum(self.reads(r, c) for c in range(self.num))

    def sizes(self, length: Any) -> Any:
        """Returns the number of positions of each chunk."""
        if isinstance(length, int):
            return device_ops.part_sizes(length, self.num)
        parts = tf.range(self.num, dtype=length.dtype)
        return length // self.num + tf.cast(parts < length % self.num, length.dtype)

    def split(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Returns the chunks of a tensor of the first device, on that device."""
        first, length = self._devices[0], x.shape[1]
        if length is not None:
            return device_ops.split(x, first, self.sizes(length), 1)
        with tf.device(first):
            sizes = self.sizes(tf.shape(x)[1])
        return device_ops.on(first, lambda x, n: tf.split(x, n, 1, self.num), x, sizes)

    def blocks(self, mask: tf.Tensor) -> list[list[tf.Tensor]]:
        """Returns the mask of each chunk of queries and each chunk of keys.

        Args:
            mask: A mask `[batch, length of query, length of key]`, of sizes that may be
                1.
        """
        rows = [mask] * self.num if mask.shape[1] == 1 else self.split(mask)
        blocks = []
        for row in rows:
            turned = tf.transpose(row, [0, 2, 1])
            parts = [turned] * self.num if row.shape[2] == 1 else self.split(turned)
            blocks.append([tf.transpose(part, [0, 2, 1]) for part in parts])
        return blocks

    def _owner(self, c: int) -> int:
        T = len(self._devices)
        return c if c < T else 2 * T - 1 - c
