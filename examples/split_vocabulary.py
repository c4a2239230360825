"""A language model whose vocabulary is spread over the devices of all four stages.

    python examples/split_vocabulary.py

Embedding and softmax share a table of 8,000 tokens, of which each device has a
quarter. On the last stage it would be most of the work. It needs no GPU,
takes 55 seconds, and ends with:

    13 stages: embedding, blocks, head, loss
    memory of the fullest device: 0.25 of all devices
    losses on one device      8.989 8.842
    losses on four devices    8.989 8.842
"""

import keras
import numpy as np

import tfgpipe

tfgpipe.make_logical_cpus(4)
VOCABULARY, LENGTH, WIDTH = 8000, 16, 64
DEVICES = [f"CPU:{p}" for p in range(4)]


def make_model() -> tuple[keras.Model, tfgpipe.layers.SplitVocabulary]:
    """Returns a decoder that computes its loss itself, of tokens and targets."""
    keras.utils.set_random_seed(0)
    vocabulary = tfgpipe.layers.SplitVocabulary(VOCABULARY, WIDTH, num_parts=4)
    tokens = keras.Input((LENGTH,), dtype="int32")
    targets = keras.Input((LENGTH,), dtype="int32")
    x = vocabulary.embed(tokens)
    for _ in range(4):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 16)(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * WIDTH, activation="gelu")(y)
        x = x + keras.layers.Dense(WIDTH)(y)
    x = keras.layers.LayerNormalization()(x)
    losses = vocabulary.cross_entropy(x, targets)
    return keras.Model([tokens, targets], losses), vocabulary


random = np.random.default_rng(0)
windows = random.integers(0, VOCABULARY, (32, LENGTH + 1)).astype("int32")
tokens, targets = windows[:, :-1], windows[:, 1:]
arguments = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0}
losses = []
for is_pipelined in (False, True):
    model, vocabulary = make_model()
    if is_pipelined:
        stages = vocabulary.stages(model, devices=DEVICES)
        model = tfgpipe.pipeline(model, num_microbatches=8, **stages)
        print(f"{len(stages['devices'])} stages: embedding, blocks, head, loss")
    model.compile(keras.optimizers.Adam(1e-3), tfgpipe.tensor_parallel.OutputLoss())
    losses.append(model.fit([tokens, targets], targets, **arguments).history["loss"])

held = dict.fromkeys(DEVICES, 0)
for v in (*model.variables, *model.optimizer.variables):
    held[v.value.device[-5:]] += int(np.prod(v.shape))
share = max(held.values()) / sum(held.values())
print(f"memory of the fullest device: {share:.2f} of all devices")
np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
print("losses on one device     ", *(f"{loss:.3f}" for loss in losses[0]))
print("losses on four devices   ", *(f"{loss:.3f}" for loss in losses[1]))
