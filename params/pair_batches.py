"""Batches of pairs: what an encoder-decoder reads, and what it is to write.

Each is `((source, shifted), target)`. The target ends in an end; shifted, it begins
with a start and lacks its last place, so that each character is predicted from those
before it. # [batch_size, source_length], [batch_size, target_length] twice
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from params import characters, stepwise
from params.pairs import Pair
from params.share import WHOLE, Share


@dataclasses.dataclass(frozen=True)
class Rows:
    """Pairs as numbers.

    Attributes:
        source: `[num_pairs, source_length]`
        shifted: What the decoder reads, `[num_pairs, target_length]`.
        target: What it is to write, `[num_pairs, target_length]`.
    """

    source: np.ndarray
    shifted: np.ndarray
    target: np.ndarray


def rows(
    pairs: Sequence[Pair],
    *,
    source_length: int,
    target_length: int,
    alphabet: characters.Alphabet = characters.ASCII,
) -> Rows:
    """Returns pairs as numbers; `target_length` counts the end."""
    source = characters.encode(
        [pair.source for pair in pairs], length=source_length, alphabet=alphabet
    )
    text = characters.encode(
        [pair.target for pair in pairs], length=target_length - 1, alphabet=alphabet
    )
    target = np.pad(text, [[0, 0], [0, 1]])
    ends = (text != characters.PADDING).sum(axis=1)
    target[np.arange(len(pairs)), ends] = characters.END
    shifted = np.pad(text, [[0, 0], [1, 0]], constant_values=characters.START)
    return Rows(source, shifted, target)


def random_batches(
    table: Rows, *, batch_size: int, steps: range, seed: int, share: Share = WHOLE
) -> tf.data.Dataset:
    """Returns one batch a step, a pure function of the pairs, the seed and the step.

    Args:
        table: The pairs.
        batch_size: Rows of a batch of all hosts.
        steps: The steps that batches are for.
        seed: Seed of the draws.
        share: Which rows of each batch are read here.
    """
    source, shifted, target = map(
        tf.constant, (table.source, table.shifted, table.target)
    )

    def batch(step: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], tf.Tensor]:
        chosen = stepwise.draws(
            step,
            batch_size=batch_size,
            below=len(table.source),
            seed=seed,
            share=share,
        )
        inputs = tf.gather(source, chosen), tf.gather(shifted, chosen)
        return inputs, tf.gather(target, chosen)

    return stepwise.batches(batch, steps)


def first_batches(table: Rows, *, batch_size: int, num_batches: int) -> tf.data.Dataset:
    """Returns batches of the first pairs, whole ones, at most so many."""
    every = tf.data.Dataset.from_tensor_slices(
        ((table.source, table.shifted), table.target)
    )
    return every.batch(batch_size, drop_remainder=True).take(num_batches)
