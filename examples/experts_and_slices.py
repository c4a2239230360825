"""A decoder with routed experts, long sequences and sharded weights, on eight devices.

    python examples/experts_and_slices.py

Each of two replicas has a slice of every large weight. A pipeline has two pairs of
devices; a pair shares out the positions of attention and the experts, and has two of
the four stages, whose weights are gathered each time that it comes to one of them. It
needs no GPU, takes 55 seconds, and ends with:

    16 weights are in slices
    losses on one device     5.379 1.713
    losses on eight devices  5.379 1.713
"""

import keras
import numpy as np

import tfgpipe

tfgpipe.make_logical_cpus(8)
LENGTH, WIDTH = 16, 128


def make_model(num_shards: int) -> keras.Model:
    """Returns decoder blocks whose attention and experts are on so many devices."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((LENGTH, WIDTH))
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        # Grouped queries, causal, keys and values going round a ring.
        x = x + tfgpipe.layers.TPSequenceAttention(
            4, key_dim=32, num_key_value_heads=2, num_shards=num_shards
        )(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization()(x)
        x = x + tfgpipe.layers.TPMixtureOfExperts(
            4, hidden_units=64, top_k=2, balancing=0.01, num_shards=num_shards
        )(y)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


random = np.random.default_rng(0)
x = random.normal(size=(32, LENGTH, WIDTH)).astype("float32")
y = x.mean(axis=-1, keepdims=True)
arguments = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}

pairs = [[f"CPU:{i}", f"CPU:{i + 1}"] for i in (0, 2, 4, 6)]
replicas = [pairs[0] + pairs[1], pairs[2] + pairs[3]]
strategy = tfgpipe.PipelineStrategy(
    num_replicas=2,
    num_stages=4,
    num_shards=2,
    devices=[device for replica in replicas for device in 2 * replica],
    shard_replicas="weights",
)
with strategy.scope():
    model = tfgpipe.pipeline(
        make_model(num_shards=2), num_microbatches=2, schedule="looped_bfs+gather"
    )
    model.compile(keras.optimizers.Adam(1e-3), "mse")
received = model.fit(x, y, **arguments).history["loss"]

alone = make_model(num_shards=1)
alone.compile(keras.optimizers.Adam(1e-3), "mse")
expected = alone.fit(x, y, **arguments).history["loss"]

sliced = [v for v in model.trainable_variables if len(strategy.copies(v.value)) == 2]
print(f"{len(sliced)} weights are in slices")
np.testing.assert_allclose(received, expected, rtol=1e-3)
print("losses on one device    ", *(f"{loss:.3f}" for loss in expected))
print("losses on eight devices ", *(f"{loss:.3f}" for loss in received))
