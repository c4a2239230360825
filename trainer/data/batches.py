"""Batches that are a function of their step alone: which rows, in which order.

All batches together are one line of examples, epoch after epoch, and step s has the
places `s * batch_size` to `(s + 1) * batch_size - 1` of it. An epoch is a permutation
of all examples, so each comes once in it; a batch may be in two epochs.

    place      0 1 2 3 4 | 5 6 7 8 9 | 10 ...       5 examples, batches of 3
    example    3 0 4 1 2 | 1 4 2 0 3 | 2  ...
    step       0 0 0 1 1 | 1 2 2 2 3 | 3  ...

The permutation is a function of the seed and the epoch alone. So a run that was killed
goes on with the batches it would have had, several batches are made at a time, and each
host makes the rows that it trains on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.hyperparams import HyperparameterError

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows of one of several hosts, by default all rows of the only one.

    Attributes:
        host: Its number, from 0.
        num_hosts: How many there are; each reads the same number of rows.
    """

    host: int = 0
    num_hosts: int = 1

    def rows(self, batch_size: int) -> slice:
        """Returns which rows of a batch are read here.

        Raises:
            HyperparameterError: If the hosts cannot share a batch evenly.
        """
        if batch_size % self.num_hosts:
            raise HyperparameterError(
                f"training.batch_size: expected a multiple of {self.num_hosts}, the "
                f"number of hosts that read it; received {batch_size}."
            )
        size = batch_size // self.num_hosts
        return slice(self.host * size, (self.host + 1) * size)


WHOLE = Share()


@functools.lru_cache(maxsize=8)
def permutation(num_examples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of an epoch, `[num_examples]` of type int64.

    It takes 8 bytes an example. The numbers that it is sorted by are those of Philox,
    which, unlike `Generator.permutation`, no version of numpy may change.
    """
    keys = np.random.Philox(key=[seed, epoch]).random_raw(num_examples)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False  # It is shared by all who ask.
    return order


def examples_of_step(
    step: int, *, batch_size: int, num_examples: int, seed: int
) -> np.ndarray:
    """Returns the numbers of the examples in a step's batch, `[batch_size]`."""
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs = places // num_examples
    examples = np.empty(batch_size, np.int64)
    for epoch in np.unique(epochs):
        order = permutation(num_examples, seed=seed, epoch=int(epoch))
        chosen = epochs == epoch
        examples[chosen] = order[places[chosen] % num_examples]
    return examples


def map_steps(make: Callable[[tf.Tensor], Any], numbers: range) -> tf.data.Dataset:
    """Returns what a function makes of each number, in order, made ahead of time."""
    import tensorflow as tf

    dataset = tf.data.Dataset.range(numbers.start, numbers.stop)
    return dataset.map(
        make, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    ).prefetch(tf.data.AUTOTUNE)


def map_steps_in_python(
    make: Callable[[int], tuple[np.ndarray, ...]],
    numbers: range,
    specs: Sequence[tf.TensorSpec],
) -> tf.data.Dataset:
    """Returns as `batches` does what a function in Python makes, of known shapes."""
    import tensorflow as tf

    def call(number: tf.Tensor) -> tuple[tf.Tensor, ...]:
        made = tf.numpy_function(
            lambda number: make(int(number)),
            [number],
            [spec.dtype for spec in specs],
            stateful=False,
        )
        return tuple(
            tf.ensure_shape(each, spec.shape)
            for each, spec in zip(made, specs, strict=True)
        )

    return map_steps(call, numbers)


def draw_rows(
    step: tf.Tensor, *, batch_size: int, below: int, seed: int, share: Share
) -> tf.Tensor:
    """Returns a number from 0 for each row of a step that is read here, of type int64.

    Args:
        step: The step.
        batch_size: Rows of the batch of all hosts.
        below: What the numbers are less than.
        seed: Seed of the draws.
        share: The host's rows: what they get does not depend on how many hosts share.
    """
    import tensorflow as tf

    drawn = tf.random.stateless_uniform(
        [batch_size],
        seed=tf.stack([tf.constant(seed, tf.int64), step]),
        maxval=below,
        dtype=tf.int64,
        alg="philox",
    )
    return drawn[share.rows(batch_size)]
