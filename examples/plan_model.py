"""The planner: how would your model train on sixteen GPUs that you do not have?

    python examples/plan_model.py

It needs no GPU, takes 15 seconds, and ends with:

    a100-80g: D=4 K=4 T=1 M=16 zero_bubble remat=none
        594 ms, 15.4 of 80 GiB
        without stages: 1.46 x the best step; 51% of it is all-reduces of gradients
    small: D=2 K=8 T=1 M=32 zero_bubble remat=none
        771 ms, 11.9 of 20 GiB
        without stages: 3.47 x the best step; 83% of it is all-reduces of gradients
"""

import dataclasses

import keras

from tfgpipe import planner

LENGTH, WIDTH, NUM_BLOCKS = 512, 4096, 6


def make_model() -> keras.Model:
    """Returns a language model of 1.5 billion weights, which are never allocated."""
    x = inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(32000, WIDTH)(x)
    for _ in range(NUM_BLOCKS):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(16, WIDTH // 16)(
            y, y, use_causal_mask=True
        )
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * WIDTH, activation="gelu")(y)
        x = x + keras.layers.Dense(WIDTH)(y)
    return keras.Model(inputs, keras.layers.Dense(32000)(x), name="lm")


keras.config.set_dtype_policy("mixed_bfloat16")
workload = planner.read(make_model)  # Traced once, for the two searches.

# A GPU of the table, and the same with a quarter of the memory and a slower network.
a100 = planner.TABLE["a100-80g"]
small = dataclasses.replace(
    a100,
    name="small",
    memory=a100.memory // 4,
    network=planner.Link(bandwidth=5e9, latency=2e-5),
)
for device in (a100, small):
    result = planner.search(workload, device=device, num_devices=16, batch_size=256)
    best = result.best[0]
    gib = best.fullest.total / 2**30
    print(f"{device.name}: {best.config}")
    print(
        f"    {1000 * best.time.total:.0f} ms, {gib:.1f} of {device.memory / 2**30:g} GiB"
    )
    (only_data_parallel,) = (x for x in result.rejected if x.name == "K=1")
    print("    without stages:", only_data_parallel.reason)
# `print(result)` has the five best, and why all others are rejected.
