"""Collectives over replicas inside a traced stage.

`tf.distribute` sums where all replicas are being built side by side; a stage is traced
once for all of them. A collective operation only has to run on each replica: they take
part in it, wherever each is in its own stage functions, if they agree on

- the group key: the same for all replicas of one stage, and for no other stage;
- the instance key: one per collective and microbatch. Empty microbatches take part as
  well, with zeros, since a replica cannot know that another has none;
- the order of collectives. TensorFlow keeps it among operations that take the same
  resource, the *token*; without one they have been seen to deadlock.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import tensorflow as tf

from tfgpipe._compat import custom_gradients


@dataclasses.dataclass(frozen=True)
class ReplicaGroup:
    """The group of a collective: the replicas of a stage, seen from one of them.

    Attributes:
        num_replicas: D, the size of the group.
        token: A resource on the replica's device.
        group_key: The group key.
        instance_key: The instance key of the microbatch's first collective.
        has_rows: One, or zero for an empty microbatch.
        instance_offsets: Counts the stage's collectives, as offsets of the instance
            key.
    """

    num_replicas: int
    token: tf.Tensor
    group_key: tf.Tensor
    instance_key: tf.Tensor
    has_rows: tf.Tensor
    instance_offsets: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @staticmethod
    def specs() -> tuple[tf.TensorSpec, ...]:
        """Returns specs of `token`, `group_key`, `instance_key` and `has_rows`."""
        dtypes = (tf.resource, tf.int32, tf.int32, tf.float32)
        return tuple(tf.TensorSpec((), dtype) for dtype in dtypes)

    def all_reduce_sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a tensor over all replicas with a non-empty microbatch.

        Its gradient is that of a sum of the losses of all replicas.
        """
        present = tf.cast(self.has_rows, tensor.dtype)

        @custom_gradients.custom_gradient
        def summed(mine: tf.Tensor) -> tuple:
            return self._collective(mine), self._collective

        return summed(tensor * present)

    def _collective(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=self.num_replicas,
            group_key=self.group_key,
            instance_key=self.instance_key + next(self.instance_offsets),
            ordering_token=[self.token],
            merge_op="Add",
            final_op="Id",
            # No `timeout_seconds`: each call would leave a thread that sleeps so long.
        )
