r"""Tokenizers: between the bytes of a text and the ids of its tokens.

    bytes             b"caf\xc3\xa9\xff"  ->  99 97 102 195 169 255
    of a file         b"caf\xc3\xa9\xff"  ->  731 169 255           "caf", then bytes

A file is a `tokenizer.json` of Hugging Face's `tokenizers`, or a `.model` of
SentencePiece. Both take text, and a corpus is bytes: what is no UTF-8 goes byte by
byte, by the tokens that a byte-level tokenizer, or one with byte fallback, has for it.
The folder of a preset of keras-hub has a tokenizer as well.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from tfgpipe_trainer import files
from tfgpipe_trainer.hyperparams import HyperparameterError

# By suffix of the file; as in setup.py.
_REQUIREMENTS = {
    ".json": "tokenizers>=0.20,<0.24",
    ".model": "sentencepiece>=0.2,<0.3",
}


class Tokenizer(abc.ABC):
    """Between the bytes of a text and the ids of its tokens.

    Attributes:
        vocabulary_size: Ids are below it.
        start: The id that starts packed documents and fills up windows: 0, which no
            text of bytes has, or with a file the one after all others.
        dtype: The type of ids in memory.
    """

    vocabulary_size: int
    start: int
    dtype: np.dtype

    @abc.abstractmethod
    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each text, `[num_tokens]`.

        Raises:
            HyperparameterError: If a text cannot be written in these tokens.
        """

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> bytes:
        """Returns the text of ids below `vocabulary_size`."""


class Bytes(Tokenizer):
    """Each byte is a token.

    Example:

    >>> from tfgpipe_params.lm.tokenizers import Bytes
    >>> Bytes().encode([b"abc"])[0].tolist()
    [97, 98, 99]
    """

    vocabulary_size = 256
    start = 0
    dtype = np.dtype(np.uint8)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the bytes of each text."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes."""
        return bytes(ids)


BYTES = Bytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTokenizer(Tokenizer):
    """The tokenizer of a file.

    Attributes:
        name: The file.
        version: Digest of the file's content and version of the package.
        encode_texts: Returns the ids of each text.
        decode_ids: Returns the text of ids.
        byte_ids: The id of each of the 256 bytes, or None without such tokens.
        bytewise: Characters that are encoded as bytes, not by `encode_texts`.
    """

    name: str
    version: str
    vocabulary_size: int
    encode_texts: Callable[[list[str]], list[list[int]]]
    decode_ids: Callable[[Sequence[int]], bytes]
    byte_ids: tuple[int, ...] | None
    bytewise: str

    @property
    def start(self) -> int:  # type: ignore[override]
        """The id after all others."""
        return self.vocabulary_size

    @property
    def dtype(self) -> np.dtype:  # type: ignore[override]
        """Two bytes an id if those do, else four; in the byte order of files."""
        return np.dtype("<u2" if self.start < 1 << 16 else "<i4")

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each text, encoded side by side.

        Raises:
            HyperparameterError: If there are bytes that are no UTF-8, and no tokens
                for bytes.
        """
        # Bytes that are no UTF-8 become characters of their own, \udc80 to \udcff.
        runs = [
            re.split(f"([{self.bytewise}])", text.decode(errors="surrogateescape"))
            for text in texts
        ]  # Text, character, text, character, ..., text
        encoded = iter(self.encode_texts([run for each in runs for run in each[::2]]))
        return [self._joined(each, encoded) for each in runs]

    def _joined(self, runs: list[str], encoded: Iterator[list[int]]) -> np.ndarray:
        ids = next(encoded)
        for character in runs[1::2]:
            received = character.encode(errors="surrogateescape")
            if self.byte_ids is None:
                raise HyperparameterError(
                    f"data.files: expected text in UTF-8, as {self.name} has no tokens "
                    f"for single bytes; received the byte {received[0]:#x}. Leave the "
                    "file out, or take a tokenizer with byte fallback."
                )
            ids = [*ids, *(self.byte_ids[byte] for byte in received), *next(encoded)]
        return np.array(ids, self.dtype)

    def decode(self, ids: Sequence[int]) -> bytes:
        """Returns the text of ids."""
        return self.decode_ids([int(each) for each in ids])


def load(name: str) -> FileTokenizer:
    """Returns the tokenizer of a file.

    Args:
        name: The file, which ends in `.json` or `.model`.

    Raises:
        HyperparameterError: If it is not there, is damaged, or its package is missing.
    """
    path = Path(name).expanduser()
    if is_preset(path):
        return _of_preset(name, digest(name))
    return parse(_read(name), name=name)


def is_preset(path: Path) -> bool:
    """Returns whether a folder has the tokenizer of a preset of keras-hub."""
    return (path / "tokenizer.json").is_file() and (path / "config.json").is_file()


@functools.lru_cache(maxsize=2)
def _of_preset(name: str, identity: str) -> FileTokenizer:
    keras_hub = _import("keras-hub", name, "keras-hub")
    try:
        path = str(Path(name).expanduser())
        tokenizer = keras_hub.tokenizers.Tokenizer.from_preset(path)
    except Exception as error:  # Each backend of a tokenizer has errors of its own.
        raise HyperparameterError(
            f"data.tokenizer: expected a preset of keras-hub; received {name!r}, whose "
            f"tokenizer cannot be read: {error}."
        ) from None
    return FileTokenizer(
        name=name,
        version=f"{identity} keras-hub {keras_hub.__version__}",
        vocabulary_size=tokenizer.vocabulary_size(),
        encode_texts=lambda texts: [
            list(map(int, ids)) for ids in tokenizer.tokenize(texts)
        ],
        decode_ids=lambda ids: str(tokenizer.detokenize(list(ids))).encode(),
        byte_ids=None,
        bytewise=_NO_UTF8,
    )


def digest(name: str) -> str:
    """Returns the SHA-256 of a tokenizer's file, or of a preset's files of it.

    Raises:
        HyperparameterError: If it cannot be read.
    """
    path = Path(name).expanduser()
    if not is_preset(path):
        return hashlib.sha256(_read(name)).hexdigest()
    parts = [path / "tokenizer.json", *sorted(path.glob("assets/tokenizer/*"))]
    return hashlib.sha256(b"".join(map(Path.read_bytes, parts))).hexdigest()


def _read(name: str) -> bytes:
    try:
        return files.to_path(name, name="data.tokenizer").read_bytes()
    except OSError as error:
        raise HyperparameterError(
            "data.tokenizer: expected a file that can be read; received "
            f"{name!r}: {error.strerror}. --mode=tokenizer trains one."
        ) from None


@functools.lru_cache(maxsize=2)
def parse(content: bytes, *, name: str) -> FileTokenizer:
    """Returns the tokenizer of a file's content.

    Args:
        content: The content.
        name: The file, which ends in `.json` or `.model`.

    Raises:
        HyperparameterError: If it is damaged, or its package is missing.
    """
    make = _hugging_face if suffix_of(name) == ".json" else _sentencepiece
    package = import_package(name)
    version = importlib.metadata.version(package.__name__)
    identity = f"{hashlib.sha256(content).hexdigest()} {package.__name__} {version}"
    try:
        return make(package, content, name=name, version=identity)
    # The packages raise Exception itself; both read what Rust and C++ cannot use.
    except Exception as error:
        kind = {".json": "Hugging Face", ".model": "SentencePiece"}[suffix_of(name)]
        raise HyperparameterError(
            f"data.tokenizer: expected a tokenizer of {kind}; received {name!r}, which "
            f"cannot be read: {error}. Bring it back from a copy, or train another by "
            "--mode=tokenizer."
        ) from None


def suffix_of(name: str) -> str:
    """Returns `.json` or `.model`, which says of what kind a file is.

    Raises:
        HyperparameterError: If it is neither.
    """
    suffix = Path(name).suffix
    if suffix not in _REQUIREMENTS:
        raise HyperparameterError(
            "data.tokenizer: expected a file that ends in .json, of Hugging Face's "
            f"tokenizers, or in .model, of SentencePiece; received {name!r}."
        )
    return suffix


def import_package(name: str) -> ModuleType:
    """Returns the package that reads and writes a file.

    Raises:
        HyperparameterError: If it is not installed.
    """
    requirement = _REQUIREMENTS[suffix_of(name)]
    return _import(requirement.partition(">")[0], name, requirement)


def _import(package: str, name: str, requirement: str) -> ModuleType:
    try:
        return importlib.import_module(package.replace("-", "_"))
    except ImportError:
        raise HyperparameterError(
            f"data.tokenizer: expected the package {package}, which {name!r} needs; "
            f"it is not installed. Try: pip install '{requirement}'"
        ) from None


_NO_UTF8 = "\udc80-\udcff"


def _hugging_face(
    package: ModuleType, content: bytes, *, name: str, version: str
) -> FileTokenizer:
    tokenizer = package.Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = json.loads(content)
    if settings["model"].get("dropout"):
        raise ValueError("its BPE has dropout, by which ids would be random")
    ids = tokenizer.get_vocab()
    byte_level = (settings.get("decoder") or {}).get("type") == "ByteLevel"
    names = _byte_characters() if byte_level else [f"<0x{b:02X}>" for b in range(256)]

    def encode_texts(texts: list[str]) -> list[list[int]]:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [each.ids for each in encoded]

    def decode_ids(ids: Sequence[int]) -> bytes:
        return tokenizer.decode(ids, skip_special_tokens=False).encode()

    if byte_level:
        # Not by `tokenizer.decode`, which replaces what is no UTF-8.
        added = {
            each["id"]: each["content"] for each in settings.get("added_tokens", [])
        }
        decode_ids = functools.partial(_decode_by_table, _byte_table(ids, added))
    return FileTokenizer(
        name=name,
        version=version,
        vocabulary_size=max(ids.values()) + 1,
        encode_texts=encode_texts,
        decode_ids=decode_ids,
        byte_ids=_ids_of(names, ids),
        bytewise=_NO_UTF8,
    )


def _byte_characters() -> list[str]:
    """Returns the character by which byte-level tokens write each byte.

    It is the byte's own in Latin-1 if that is printable, else one from 256 on, as of
    GPT-2.
    """
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = itertools.count(256)
    return [chr(b if b in own else next(others)) for b in range(256)]


def _byte_table(ids: Mapping[str, int], added: Mapping[int, str]) -> dict[int, bytes]:
    """Returns the bytes of each token of a byte-level tokenizer."""
    bytes_of = {character: b for b, character in enumerate(_byte_characters())}
    table = {i: text.encode() for i, text in added.items()}
    for token, i in ids.items():
        if i not in table:
            # What is written in other characters is no text, but a name of its own.
            known = all(character in bytes_of for character in token)
            own = bytes(bytes_of[c] for c in token) if known else token.encode()
            table[i] = own
    return table


def _decode_by_table(table: Mapping[int, bytes], ids: Sequence[int]) -> bytes:
    # An id between others that no token has stands for nothing.
    return b"".join(table.get(each, b"") for each in ids)


def _ids_of(names: Sequence[str], ids: Mapping[str, int]) -> tuple[int, ...] | None:
    """Returns the ids of tokens if all are there."""
    if not all(each in ids for each in names):
        return None
    return tuple(ids[each] for each in names)


# SentencePiece writes it for a space.
_SPACE = "\u2581"


def _sentencepiece(
    package: ModuleType, content: bytes, *, name: str, version: str
) -> FileTokenizer:
    if not content:
        raise ValueError("it is empty")
    processor = package.SentencePieceProcessor(model_proto=content)
    size = processor.get_piece_size()
    pieces = {processor.id_to_piece(i): i for i in range(size)}
    byte_ids = _ids_of([f"<0x{b:02X}>" for b in range(256)], pieces)
    table = {}
    for piece, i in pieces.items():
        if processor.is_byte(i):
            table[i] = bytes([int(piece[1:-1], 16)])
        elif processor.is_unknown(i):
            table[i] = "\ufffd".encode()
        elif not processor.is_control(i):
            table[i] = piece.replace(_SPACE, " ").encode()

    def encode_texts(texts: list[str]) -> list[list[int]]:
        return processor.encode(texts, out_type=int, num_threads=-1)

    return FileTokenizer(
        name=name,
        version=version,
        vocabulary_size=size,
        encode_texts=encode_texts,
        decode_ids=functools.partial(_decode_by_table, table),
        byte_ids=byte_ids,
        # A text's own such character would come back as a space.
        bytewise=_NO_UTF8 + (_SPACE if byte_ids else ""),
    )


_LINES = 1 << 14
_BATCH = 1 << 21


def encode_all(
    tokenizer: Tokenizer, texts: Iterable[bytes], *, lines: bool
) -> Iterator[np.ndarray]:
    """Yields the ids of texts, encoding many at a time.

    Args:
        tokenizer: The tokenizer.
        texts: The texts.
        lines: True to split texts at ends of lines, so that the parts of a long one
            are encoded in parallel; the ids of all parts are yielded then.
    """
    batch: list[bytes] = []
    size = 0
    for text in split_lines(texts) if lines else texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield from tokenizer.encode(batch)
            batch, size = [], 0
    if batch:
        yield from tokenizer.encode(batch)


def split_lines(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yields texts in pieces of whole lines, 16 KiB or one line longer."""
    for text in texts:
        first = 0
        while first < len(text):
            end = text.find(b"\n", first + _LINES - 1) + 1 or len(text)
            yield text[first:end]
            first = end
