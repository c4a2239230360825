"""An encoder-decoder transformer.

    source -> embedding -> attention, perceptron -> ... -> memory
                                                             |  (to each block)
    shifted target -> embedding -> causal attention, attention to memory, perceptron
                                                  -> ... -> logits

Zeros are padding. The embeddings mask them, Keras hands the masks on: no attention
looks at padding, and the logits carry the target's mask, by which loss and metrics
count.
"""

from __future__ import annotations

import keras

from tfgpipe_params.lm.transformer import Positions
from tfgpipe_params.translate.sizes import EncoderDecoder

layers = keras.layers


def encoder_decoder(
    hyper: EncoderDecoder,
    *,
    vocabulary_size: int,
    source_length: int,
    target_length: int,
) -> keras.Model:
    """Returns the network, from a source and a target shifted by one to logits.

    Args:
        hyper: Its sizes.
        vocabulary_size: Number of characters, padding among them.
        source_length: Number of characters that the encoder reads.
        target_length: Number of characters that the decoder reads, and writes.
    """
    source = keras.Input([source_length], dtype="int32", name="source")
    shifted = keras.Input([target_length], dtype="int32", name="shifted")
    memory = _embedded(source, hyper, vocabulary_size)
    # It stays [batch_size, source_length, width]; below x has the target's length.
    for _ in range(hyper.num_encoder_layers):
        memory = _attending(memory, None, hyper)
        memory = _perceptron(memory, hyper)
    memory = layers.LayerNormalization()(memory)
    # Keras' attention takes the mask off its inputs: the next block would find none.
    mask = keras.ops.not_equal(source, 0)
    x = _embedded(shifted, hyper, vocabulary_size)
    for _ in range(hyper.num_decoder_layers):
        x = _attending(x, None, hyper, causal=True)
        x = _attending(x, memory, hyper, mask=mask)
        x = _perceptron(x, hyper)
    logits = layers.Dense(vocabulary_size)(layers.LayerNormalization()(x))
    return keras.Model([source, shifted], logits)


def _embedded(
    numbers: keras.KerasTensor, hyper: EncoderDecoder, vocabulary_size: int
) -> keras.KerasTensor:
    vectors = layers.Embedding(vocabulary_size, hyper.width, mask_zero=True)(numbers)
    return Positions()(vectors)


def _attending(
    x: keras.KerasTensor,
    memory: keras.KerasTensor | None,
    hyper: EncoderDecoder,
    *,
    causal: bool = False,
    mask: keras.KerasTensor | None = None,
) -> keras.KerasTensor:
    """Adds what attention finds in the memory, or without one in `x` itself."""
    normed = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(
        hyper.num_heads, hyper.width // hyper.num_heads
    )
    found = attention(
        normed,
        normed if memory is None else memory,
        value_mask=mask,
        use_causal_mask=causal,
    )
    return layers.Add()([x, layers.Dropout(hyper.dropout)(found)])


def _perceptron(x: keras.KerasTensor, hyper: EncoderDecoder) -> keras.KerasTensor:
    """Adds what a perceptron makes of each position."""
    inner = layers.LayerNormalization()(x)
    inner = layers.Dense(hyper.mlp_width, activation="gelu")(inner)
    inner = layers.Dense(hyper.width)(inner)
    return layers.Add()([x, layers.Dropout(hyper.dropout)(inner)])
