"""A model that scores ids, its data, and losses that leave some of them out."""

from __future__ import annotations

import keras
import numpy as np

from tests.helpers.fitted_pairs import NUM_ROWS
from tests.helpers.zoo import IDS, ids, padded_ids

layers = keras.layers


def tokens(mask: bool = False) -> keras.Model:
    """A score for each id at each of five places."""
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(IDS, 4, mask_zero=mask)(inputs)
    x = layers.Dense(6, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(IDS)(x))


IDS_IN, IDS_OUT = padded_ids(NUM_ROWS, 5), ids(NUM_ROWS, 5, seed=3)
# More of the later rows are left out, so microbatches hold unequal parts.
IDS_OUT = np.where(np.arange(NUM_ROWS)[:, None] + IDS_OUT > 9, 0, IDS_OUT)


def token_loss(ignore_class, reduction):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=ignore_class, reduction=reduction
    )
