"""Sums over replicas from inside a traced stage.

`tf.distribute` sums where all replicas are being built side by side; a stage is traced
once for all of them. A collective operation needs no more than to run on each: the
replicas meet at it, wherever each is in its own program, if they agree on

- who meets: a number that the replicas of one stage have in common;
- at which meeting: a number for each sum and microbatch. Empty microbatches meet as
  well, with nothing, since a replica cannot know that another has none;
- the order of meetings. TensorFlow keeps it among operations that take the same
  resource, the *token*; without one they have been seen to wait for each other forever.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a stage, seen from one of them.

    Attributes:
        number: D, how many there are.
        token: A resource on the replica's device.
        group: A number that no other stage has.
        meeting: The number of the first sum of the microbatch.
        present: One, or zero for a microbatch without rows.
        numbers: Counts the sums of the stage.
    """

    number: int
    token: tf.Tensor
    group: tf.Tensor
    meeting: tf.Tensor
    present: tf.Tensor
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @staticmethod
    def specs() -> tuple[tf.TensorSpec, ...]:
        """Returns shapes and types of `token`, `group`, `meeting` and `present`."""
        dtypes = (tf.resource, tf.int32, tf.int32, tf.float32)
        return tuple(tf.TensorSpec((), dtype) for dtype in dtypes)

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the tensors of all replicas that are present.

        Its gradient is that of a sum of the losses of all replicas.
        """
        present = tf.cast(self.present, tensor.dtype)

        @tf.custom_gradient
        def summed(mine: tf.Tensor) -> tuple:
            return self._met(mine), self._met

        return summed(tensor * present)

    def _met(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=self.number,
            group_key=self.group,
            instance_key=self.meeting + next(self.numbers),
            ordering_token=[self.token],
            merge_op="Add",
            final_op="Id",
            # No `timeout_seconds`: each sum would leave a thread that sleeps so long.
        )
