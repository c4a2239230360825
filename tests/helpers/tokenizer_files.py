"""Files of small tokenizers, and the text that they are trained on."""

from __future__ import annotations

from pathlib import Path

from tfgpipe_params.lm import tokenizer_training

TEXT = "".join(
    f"def square_{i}(x):\n    return  {i} * x  # café, 漢字\n\n" for i in range(300)
).encode()


def write(folder: Path, suffix: str) -> str:
    """Trains a tokenizer of each kind's smallest useful size, and returns its file.

    Args:
        folder: Where to write it.
        suffix: `.json` or `.model`.
    """
    path = folder / f"words{suffix}"
    path.write_bytes(
        tokenizer_training.train([TEXT], name=str(path), vocabulary_size=400)
    )
    return str(path)
