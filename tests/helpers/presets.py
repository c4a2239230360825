"""Presets of keras-hub, made here."""

from __future__ import annotations

from pathlib import Path

import keras_hub


def write(folder: Path) -> Path:
    """Writes a preset with a tokenizer of its own."""
    characters = [
        *(chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))),
        *(chr(256 + i) for i in range(68)),
    ]
    pieces = [*characters, "\u0120i", "\u0120is", "<|endoftext|>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = ["\u0120 i", "\u0120i s"]
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=merges)
    tokenizer.save_to_preset(str(folder))
    sizes = {"num_layers": 1, "num_heads": 1, "hidden_dim": 8, "intermediate_dim": 8}
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(pieces), max_sequence_length=16, **sizes
    )
    backbone.save_to_preset(str(folder))
    return folder
