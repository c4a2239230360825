"""All kinds of parallelism together, on up to eight devices, against one device."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tests.helpers.marks import nightly
from tfgpipe.tensor_parallel import full_weights

L, WIDTH = 8, 96
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, L, WIDTH)), RNG.normal(size=(12, L, 2))

# Replicas, devices in a row, shards; what shards have; replicas' weights; schedule.
CASES = [
    (2, 1, 2, "heads", "none", "gpipe"),
    (2, 1, 2, "positions", "whole_weights", "gpipe"),
    (1, 2, 2, "positions", "none", "1f1b"),
    (1, 2, 2, "experts", "none", "zero_bubble"),
    (2, 1, 2, "experts", "weights", "gpipe"),
    (1, 1, 4, "positions and experts", "none", "gpipe"),
    (1, 1, 2, "heads and experts", "none", "gpipe"),
    (1, 2, 2, "positions and units", "none", "interleaved"),
    (2, 2, 2, "heads", "slots", "1f1b"),
    (2, 2, 2, "positions and experts", "weights", "looped_bfs+gather"),
]


def make(kind: str, T: int) -> keras.Model:
    """Returns a decoder block between dense layers, its parts on T devices."""
    layers = keras.layers
    x = inputs = keras.Input((L, WIDTH))
    x = layers.Dense(WIDTH, activation="tanh")(x)
    y = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(4, 4)
    if "heads" in kind:
        attention = tfgpipe.layers.TPMultiHeadAttention(4, key_dim=4, num_shards=T)
    elif "positions" in kind:
        attention = tfgpipe.layers.TPSequenceAttention(4, key_dim=4, num_shards=T)
    x = x + attention(y, y, use_causal_mask=True)
    if "units" in kind:
        x = x + tfgpipe.layers.TPMLP(24, units=WIDTH, num_shards=T)(x)
    if "experts" in kind:
        x = x + tfgpipe.layers.TPMixtureOfExperts(
            4, hidden_units=24, balancing=0.1, num_shards=T
        )(x)
    return keras.Model(inputs, layers.Dense(2)(layers.LayerNormalization()(x)))


@pytest.mark.parametrize(
    ("D", "P", "T", "kind", "shares", "schedule"),
    nightly(CASES, gate=[CASES[1], CASES[7]]),
)
def test_together_they_train_as_one_device(floatx, D, P, T, kind, shares, schedule):
    """In all weights, after four steps of Adam."""
    floatx("float64")
    v = 2 if "bfs" in schedule or schedule == "interleaved" else 1
    replicas = [[f"CPU:{d * P * T + i}" for i in range(P * T)] for d in range(D)]
    strategy = tfgpipe.PipelineStrategy(
        num_stages=P * v,
        num_replicas=D,
        num_shards=T,
        devices=[device for replica in replicas for device in v * replica],
        shard_replicas=shares,
    )
    models = []
    for shards in (1, T):
        compare.fresh_names()
        keras.utils.set_random_seed(0)
        with strategy.scope() if shards > 1 else contextlib.nullcontext():
            model = make(kind, shards)
            if shards > 1:
                model = tfgpipe.pipeline(model, num_microbatches=2, schedule=schedule)
            model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), "mse")
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        models.append(model)
    compare.assert_close(*map(full_weights, models), 1e-8, 1e-10)
    sliced = [len(strategy.copies(v.value)) for v in models[1].trainable_variables]
    assert (shares == "weights") == any(
        n > 1 and not hasattr(v.value, "values")
        for n, v in zip(sliced, models[1].trainable_variables, strict=True)
    )
