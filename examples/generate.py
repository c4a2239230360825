"""A decoder in four stages learns to count, and answers prompts.

    python examples/generate.py

Keys and values of earlier positions stay on the device of their stage, so that each
token is one pass of one position. The tokens are those of the plain model.

It needs no GPU, takes 45 seconds, and ends with:

    3 4 -> 3 4 5 6 7 8 9 10 11 12 13 14
    20 18 16 -> 20 18 16 14 12 10 8 6 4 2 0 0
    as the plain model: True
"""

import keras
import numpy as np

import tfgpipe

tfgpipe.make_logical_cpus(4)
keras.utils.set_random_seed(0)
NUMBERS, LENGTH, WIDTH = 64, 12, 64

tokens = keras.Input((None,), dtype="int32")
x = keras.layers.Embedding(NUMBERS, WIDTH)(tokens)
for _ in range(4):
    y = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(4, 16)(y, y, use_causal_mask=True)
    y = keras.layers.LayerNormalization()(x)
    y = keras.layers.Dense(4 * WIDTH, activation="gelu")(y)
    x = x + keras.layers.Dense(WIDTH)(y)
model = keras.Model(tokens, keras.layers.Dense(NUMBERS)(x))
model.compile(
    keras.optimizers.Adam(2e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)

random = np.random.default_rng(0)
first, step = random.integers(0, 30, (2048, 1)), random.integers(-3, 4, (2048, 1))
counts = np.clip(first + step * np.arange(LENGTH), 0, NUMBERS - 1)

model = tfgpipe.pipeline(model, num_stages=4, num_microbatches=4)
model.fit(counts[:, :-1], counts[:, 1:], batch_size=128, epochs=8, verbose=0)

prompts = [[3, 4], [20, 18, 16]]
answers = model.generate(prompts, max_length=LENGTH)
for prompt, answer in zip(prompts, answers, strict=True):
    print(*prompt, "->", *answer)

plain, whole = model.unpipelined(), prompts[0]
while len(whole) < LENGTH:
    whole = [*whole, int(np.argmax(plain(np.array([whole]))[0, -1]))]
print("as the plain model:", whole == answers[0].tolist())
