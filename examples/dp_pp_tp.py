"""Replicas x stages x shards: data, pipeline and tensor parallelism on eight devices.

    python examples/dp_pp_tp.py

It needs no GPU, takes 30 seconds, and ends with:

    stage 0 on CPU:0 + CPU:1, CPU:4 + CPU:5
    stage 1 on CPU:2 + CPU:3, CPU:6 + CPU:7
    losses on one device     1.622 0.508
    losses on eight devices  1.622 0.508
"""

import keras
import numpy as np

import tfgpipe

tfgpipe.make_logical_cpus(8)
LENGTH, WIDTH = 8, 16


def make_model(num_shards: int) -> keras.Model:
    """Returns transformer blocks whose weights are split over the shards."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((LENGTH, WIDTH))
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        x = x + tfgpipe.layers.TPMultiHeadAttention(
            4, key_dim=WIDTH // 4, num_shards=num_shards
        )(y, y)
        y = keras.layers.LayerNormalization()(x)
        x = x + tfgpipe.layers.TPMLP(4 * WIDTH, units=WIDTH, num_shards=num_shards)(y)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


random = np.random.default_rng(0)
x = random.normal(size=(64, LENGTH, WIDTH)).astype("float32")
y = x.mean(axis=-1, keepdims=True)
arguments = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0}

strategy = tfgpipe.PipelineStrategy(num_replicas=2, num_stages=2, num_shards=2)
with strategy.scope():
    model = tfgpipe.pipeline(
        make_model(num_shards=2), num_microbatches=4, schedule="1f1b"
    )
    model.compile(keras.optimizers.Adam(1e-2), "mse")
received = model.fit(x, y, **arguments).history["loss"]

alone = make_model(num_shards=1)
alone.compile(keras.optimizers.Adam(1e-2), "mse")
expected = alone.fit(x, y, **arguments).history["loss"]

for k in range(2):
    # Shards are joined by a plus sign, replicas by a comma.
    print(f"stage {k} on {strategy.mesh.short_names(k)}")
np.testing.assert_allclose(received, expected, rtol=1e-4)
print("losses on one device    ", *(f"{loss:.3f}" for loss in expected))
print("losses on eight devices ", *(f"{loss:.3f}" for loss in received))
