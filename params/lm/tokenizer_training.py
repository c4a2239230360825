"""Training of tokenizers on the text of a corpus."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tfgpipe_params.lm import tokenizers
from tfgpipe_params.lm.corpus import Corpus
from tfgpipe_trainer import files
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.hyperparams import HyperparameterError


def write(corpus: Corpus) -> str:
    """Trains a tokenizer on the training split, and writes `corpus.tokenizer`.

    Returns:
        How many tokens there are, and how long they are.

    Raises:
        HyperparameterError: If there is such a file, it cannot be written, or the text
            does not have as many tokens.
    """
    name = corpus.tokenizer
    if name is None:
        raise HyperparameterError(
            "data.tokenizer: expected the file to write, such as words.json or "
            "words.model; received None."
        )
    if files.is_remote(name):
        raise HyperparameterError(
            "data.tokenizer: expected a file of this machine to write; received "
            f"{name!r}. Copy it there afterwards."
        )
    path = Path(name).expanduser()
    if path.exists():
        raise HyperparameterError(
            "data.tokenizer: expected a file that is not there, which "
            f"--mode=tokenizer writes; {name} is. Give another name, or remove it."
        )
    if not path.parent.is_dir():
        raise HyperparameterError(
            f"data.tokenizer: expected a file in a folder that is there; {name} is "
            "not. Make the folder first."
        )
    content = train(
        tokenizers.split_lines(corpus.parts("train")),
        name=name,
        vocabulary_size=corpus.vocabulary_size or 8192,
    )
    tokenizer = tokenizers.parse(content, name=name)
    encoded = tokenizers.encode_all(tokenizer, corpus.chunks("validation"), lines=True)
    num_tokens = sum(map(len, encoded))
    num_bytes = sum(map(len, corpus.chunks("validation")))
    try:
        store.atomic_write(path, content)
    except OSError as error:
        raise HyperparameterError(
            f"data.tokenizer: expected a file that can be written; {name} cannot: "
            f"{error.strerror}."
        ) from None
    return (
        f"{name} has {tokenizer.vocabulary_size:,} tokens, of "
        f"{num_bytes / max(num_tokens, 1):.2f} bytes each on the validation split."
    )


def train(texts: Iterable[bytes], *, name: str, vocabulary_size: int) -> bytes:
    """Returns the content of a file with the byte pair encoding of a text.

    Of the same text and the same version of the package it is the same. Bytes that are
    no UTF-8 are not learnt from.

    Args:
        texts: The text in chunks, whole lines each.
        name: The file; its suffix says what kind it is of.
        vocabulary_size: Tokens to find; there are fewer if the text is too small.

    Raises:
        HyperparameterError: If that many, or so few, tokens cannot be found.
    """
    make = (
        _train_byte_level
        if tokenizers.suffix_of(name) == ".json"
        else _train_sentencepiece
    )
    decoded = (text.decode(errors="ignore") for text in texts)
    try:
        return make(tokenizers.import_package(name), decoded, vocabulary_size)
    except RuntimeError as error:
        raise HyperparameterError(
            "data.vocabulary_size: expected a number of tokens that the text has; "
            f"received {vocabulary_size}: {str(error).rpartition('] ')[2]}"
        ) from None


def _train_byte_level(package: Any, texts: Iterator[str], size: int) -> bytes:
    tokenizer = package.Tokenizer(package.models.BPE())
    byte_level = package.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True).encode()


def _train_sentencepiece(package: Any, texts: Iterator[str], size: int) -> bytes:
    content = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines()),
        model_writer=content,
        model_type="bpe",
        vocab_size=size,
        hard_vocab_limit=False,
        # Every text comes back as it was.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        byte_fallback=True,
        allow_whitespace_only_pieces=True,  # Indentation.
        max_sentence_length=1 << 30,  # Longer ones would be left out.
        num_threads=1,
        minloglevel=2,
    )
    return content.getvalue()
