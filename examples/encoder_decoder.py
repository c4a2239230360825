"""An encoder-decoder on sentences of different lengths, with Keras' masks.

    python examples/encoder_decoder.py

It needs no GPU, takes 15 seconds, and ends with:

    a batch of shape (16, 4) with 8 zeros
    a batch of shape (16, 8) with 0 zeros
    epoch 0  plain 2.751  pipeline 2.751
    epoch 1  plain 2.478  pipeline 2.478
    epoch 2  plain 2.394  pipeline 2.394
"""

import keras
import numpy as np

import tfgpipe

tfgpipe.make_logical_cpus(2)
START, NUM_TOKENS, WIDTH = 1, 12, 32  # 0 is padding.


def make_model() -> keras.Model:
    """Returns an encoder and a decoder that attends to it, for any lengths."""
    keras.utils.set_random_seed(0)
    source = keras.Input((None,), dtype="int32", name="source")
    target = keras.Input((None,), dtype="int32", name="target")
    # `mask_zero` masks the padding, in all layers that follow and in the loss.
    x = keras.layers.Embedding(NUM_TOKENS, WIDTH, mask_zero=True)(source)
    x = keras.layers.GRU(WIDTH, return_sequences=True)(x)
    y = keras.layers.Embedding(NUM_TOKENS, WIDTH, mask_zero=True)(target)
    y = keras.layers.GRU(WIDTH, return_sequences=True)(y)
    attention = keras.layers.MultiHeadAttention(4, WIDTH // 4)
    # `y + attention(y, x)` would lose the mask, as in any Keras model.
    y = keras.layers.Add()([y, attention(y, x)])
    y = keras.layers.LayerNormalization()(y)
    logits = keras.layers.Dense(NUM_TOKENS)(y)
    model = keras.Model({"source": source, "target": target}, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Not Adam: of a token that occurs twice in a batch Keras squares each gradient by
    # itself. In a pipeline they are summed before, as those of any other weight.
    model.compile(keras.optimizers.SGD(0.03, momentum=0.9), loss)
    return model


# Of 3 to 8 tokens, the shortest first.
random = np.random.default_rng(0)
sentences = [random.integers(2, NUM_TOKENS, 3 + i // 24) for i in range(144)]


class Reversals(keras.utils.PyDataset):
    """Sentences to reverse, in batches of 16 that are padded to their longest."""

    def __len__(self) -> int:
        """Returns the number of batches."""
        return 9

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns a batch: the sentences, and the reversed ones shifted by a token."""
        batch = sentences[16 * index : 16 * (index + 1)]
        pad = keras.utils.pad_sequences
        target = pad([[START, *s[:0:-1]] for s in batch], padding="post")
        return (
            {"source": pad(batch, padding="post"), "target": target},
            pad([s[::-1] for s in batch], padding="post"),
        )


batches = Reversals()
for x, _ in (batches[1], batches[8]):
    print(
        "a batch of shape", x["source"].shape, "with", (x["source"] == 0).sum(), "zeros"
    )

plain = make_model()
pipelined = tfgpipe.pipeline(
    make_model(), num_stages=2, num_microbatches=4, schedule="1f1b"
)
# A microbatch of short sentences has fewer tokens. The loss is the mean over those of
# the whole batch, padding aside, however they are split.
expected = plain.fit(batches, epochs=3, shuffle=False, verbose=0).history["loss"]
received = pipelined.fit(batches, epochs=3, shuffle=False, verbose=0).history["loss"]
np.testing.assert_allclose(received, expected, rtol=1e-3)
for epoch, losses in enumerate(zip(expected, received, strict=True)):
    print("epoch {}  plain {:.3f}  pipeline {:.3f}".format(epoch, *losses))
