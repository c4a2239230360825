"""A plain model's file, trained on in four stages, and saved as a plain model again.

    python examples/checkpoints.py

It needs no GPU, takes 10 seconds, writes into `checkpoints/`, and ends with:

    sequential: 4 stages, 4 microbatches, remat=stage
    stage  device  layers            parameters  weights    slots  share
    0      CPU:0   dense, dense_1           544  2.1 KiB  4.2 KiB  25.0%
    1      CPU:1   dense_2, dense_3         544  2.1 KiB  4.2 KiB  25.0%
    2      CPU:2   dense_4, dense_5         544  2.1 KiB  4.2 KiB  25.0%
    3      CPU:3   dense_6, dense_7         544  2.1 KiB  4.2 KiB  25.0%
    undisturbed 0.998 0.981
    four, back  0.998 0.981
"""

from pathlib import Path

import keras
import numpy as np

import tfgpipe

tfgpipe.make_logical_cpus(4)
keras.utils.set_random_seed(0)
folder = Path("checkpoints")
folder.mkdir(exist_ok=True)

random = np.random.default_rng(0)
x = random.standard_normal((64, 16), dtype="float32")
arguments = {"batch_size": 32, "shuffle": False, "verbose": 0}


def train(model: keras.Model) -> float:
    """Trains for two epochs, and returns the last loss."""
    return model.fit(x, x, epochs=2, **arguments).history["loss"][-1]


layers = [keras.layers.Dense(16, activation="relu") for _ in range(8)]
plain = keras.Sequential([keras.Input((16,)), *layers])
plain.compile(keras.optimizers.Adam(1e-2), "mse")
train(plain)
# A `.keras` file has weights, Adam's moments, and what the model was compiled with.
plain.save(folder / "plain.keras")
expected = [train(plain), train(plain)]  # What an undisturbed run goes on with.

loaded = keras.saving.load_model(folder / "plain.keras")
four = tfgpipe.pipeline(loaded, num_stages=4, num_microbatches=4, schedule="1f1b")
received = [train(four)]
print(tfgpipe.stage_table(four))

back = four.unpipelined()  # A `keras.Sequential` with the same weights.
back.compile(four.optimizer, four.loss)  # With the optimizer, so with its moments.
back.save(folder / "back.keras")  # Loads without tfgpipe.
received.append(train(keras.saving.load_model(folder / "back.keras")))

np.testing.assert_allclose(received, expected, rtol=1e-4)
print("undisturbed", *(f"{loss:.3f}" for loss in expected))
print("four, back ", *(f"{loss:.3f}" for loss in received))
