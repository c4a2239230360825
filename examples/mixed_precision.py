"""Mixed precision: half the bytes between stages, and a step that overflows.

    python examples/mixed_precision.py

It needs no GPU, takes 15 seconds, and ends with:

    float32         weights float32,  4,096 bytes a microbatch between stages, loss 0.02
    mixed_bfloat16  weights float32,  2,048 bytes a microbatch between stages, loss 0.02
    mixed_float16   weights float32,  2,048 bytes a microbatch between stages, loss 0.02
    after an overflow no weight has moved, and the loss scale is halved
"""

import keras
import numpy as np

import tfgpipe

tfgpipe.make_logical_cpus(2)
WIDTH, BATCH = 64, 64


def make_model(dtype: str) -> tfgpipe.PipelinedModel:
    """Returns a perceptron in two stages that computes in a type of floats."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(5)]
    layers = [*hidden, keras.layers.Dense(1, dtype="float32")]  # Exact outputs.
    model = tfgpipe.PipelinedModel(
        layers, num_stages=2, num_microbatches=4, schedule="1f1b", dtype=dtype
    )
    # Under mixed_float16 `compile` puts a LossScaleOptimizer around this one.
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return model


random = np.random.default_rng(0)
x = random.standard_normal((256, WIDTH), dtype="float32")
y = x.mean(axis=1, keepdims=True)

for dtype in ("float32", "mixed_bfloat16", "mixed_float16"):
    model = make_model(dtype)
    history = model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    sent = model.plan(batch_size=BATCH).stages[1].received_bytes
    kernel = model.trainable_weights[0]
    print(
        f"{dtype:14}  weights {kernel.dtype}, {sent:6,.0f} bytes a microbatch between "
        f"stages, loss {history.history['loss'][-1]:.2f}"
    )

# An overflow in one microbatch reaches the gradient of the whole step, which is skipped.
before, scale = model.get_weights(), float(model.optimizer.dynamic_scale)
x[5] = 1e6  # Beyond 65504, the largest float16.
model.train_on_batch(x[:BATCH], y[:BATCH])
for old, new in zip(before, model.get_weights(), strict=True):
    np.testing.assert_array_equal(old, new)
assert float(model.optimizer.dynamic_scale) == scale / 2
print("after an overflow no weight has moved, and the loss scale is halved")
