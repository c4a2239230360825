r"""Text: files as tokens, windows cut from them, documents packed into windows.

A token is a byte, or with `data.tokenizer` what that says. A window is
`(inputs, targets)`, `[batch_size, length]` each, `targets` one token further on.
Documents may be packed: many short ones in one window, long ones in chunks.

    \0 a d o c u m e n t \0 a n o t h e r \0 0 1 \0 \0 \0     one window

A zero, or the id after those of a tokenizer, starts each chunk, and fills up the end.
The longest chunks are placed first, each in the window that it fills best: "best-fit
decreasing", as of Ding et al. 2024, "Fewer Truncations Improve Language Modeling". Only
documents longer than a window are cut.
"""

from __future__ import annotations

import functools
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tfgpipe_params.lm import text_files, token_cache, tokenizers
from tfgpipe_params.lm.tokenizers import BYTES, FileTokenizer, Tokenizer
from tfgpipe_trainer import batches, devices, files
from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import tensorflow as tf


# Tests repeat themselves, and what others have installed differs between machines.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


class Corpus(Hyperparams):
    """The tokens of text files, by default the source of Python's standard library.

    Every tenth file is for validation. Fewer than ten files are each cut, the last
    tenth of their bytes for validation. Documents are paragraphs, which blank lines
    end: of a program the functions, about.
    """

    files: str | None = field(
        default=None, help="Glob of text files; None: Python's standard library."
    )
    documents: Literal["joined", "packed"] = field(
        default="joined", help="packed: attention within each paragraph only."
    )
    text_key: str = field(
        default="text", help="Key of the text in .jsonl, .parquet and .arrow files."
    )
    tokenizer: str | None = field(
        default=None,
        help="Tokenizer file, .json or .model; None: each byte is a token.",
    )
    vocabulary_size: int | None = field(
        default=None,
        at_least=257,
        less_than=2**22,
        help="Vocabulary size for --mode=tokenizer; None: 8192.",
    )

    def read(self, split: Literal["train", "validation"]) -> np.ndarray:
        """Returns the bytes of a split, `[num_bytes]` of type uint8.

        Raises:
            HyperparameterError: If `files` matches no file.
        """
        text = bytearray()  # It grows in place: no two copies of all.
        for part in self.chunks(split):
            text += part
        return np.frombuffer(text, np.uint8)

    def read_documents(self, split: Literal["train", "validation"]) -> list[bytes]:
        """Returns the documents of a split, none of which holds a zero byte.

        Raises:
            HyperparameterError: If `files` matches no file, or one holds a zero byte.
        """
        documents = list(self._documents(self.parts(split)))
        if any(b"\0" in document for document in documents):
            raise HyperparameterError(
                "data.files: expected text without zero bytes, which start packed "
                "documents; received a file that has some. Leave it out, or try "
                "data.documents=joined."
            )
        return documents

    def load_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
            HyperparameterError: If its file is not there or damaged, its package is
                missing, or it has another size than `vocabulary_size`.
        """
        if self.tokenizer is None:
            return BYTES
        return self._load(self.tokenizer)

    def _load(self, name: str) -> FileTokenizer:
        tokenizer = tokenizers.load(name)
        size = tokenizer.vocabulary_size
        if self.vocabulary_size not in (None, size):
            raise HyperparameterError(
                f"data.vocabulary_size: expected None or {size}, the tokens of "
                f"{self.tokenizer}; received {self.vocabulary_size}, which only "
                "--mode=tokenizer asks for."
            )
        return tokenizer

    def read_tokens(
        self, split: Literal["train", "validation"], *, window: int
    ) -> np.ndarray:
        """Returns the tokens of a split, `[num_tokens]`.

        Ids of a tokenizer's file are kept in files beside it, and are mapped from
        there; they are encoded once.

        Args:
            split: The split.
            window: Tokens of a window into which documents are packed, if they are;
                windows are then returned one after another.

        Raises:
            HyperparameterError: If `files` or `tokenizer` cannot be used.
        """
        packed = self.documents == "packed"
        if self.tokenizer is None:
            if packed:
                return pack(self.read_documents(split), size=window).ravel()
            return self.read(split)
        tokenizer = self._load(self.tokenizer)

        def encode(parts: Iterable[bytes]) -> Iterator[np.ndarray]:
            if not packed:
                yield from tokenizers.encode_all(tokenizer, parts, lines=True)
                return
            found = self._documents(parts)
            documents = tokenizers.encode_all(tokenizer, found, lines=False)
            start, dtype = tokenizer.start, tokenizer.dtype
            yield pack(list(documents), size=window, start=start, dtype=dtype).ravel()

        cut = f"packed {window}" if packed else "joined"
        return token_cache.encoded(
            files.kept_beside(self.tokenizer, ".tokens"),
            read=lambda: self.parts(split) if packed else self.chunks(split),
            encode=encode,
            version=f"1 {cut} {tokenizer.version}",
            dtype=tokenizer.dtype,
        )

    def chunks(self, split: str) -> Iterator[bytes]:
        """Yields the text of a split in chunks, which joined are all of it."""
        for number, part in enumerate(self.parts(split)):
            yield b"\n" + part if number else part

    def parts(self, split: str) -> Iterator[bytes]:
        """Yields the part of each file that belongs to a split, records one by one."""
        paths, of_records = self._paths(), self._of_records
        for number, path in enumerate(paths):
            is_cut = len(paths) < 10
            if not is_cut and (number % 10 == 0) != (split == "validation"):
                continue
            if of_records:
                texts = list(text_files.texts(path, self.text_key))
                yield from _part(texts, split) if is_cut else texts
            else:
                text = _bytes(path)
                yield _part(text, split) if is_cut else text

    @functools.cached_property
    def _of_records(self) -> bool:
        """True if files are of records, of which each is a document.

        Raises:
            HyperparameterError: If some are, and others are not.
        """
        kinds = {text_files.has_records(path) for path in self._paths()}
        if len(kinds) > 1:
            raise HyperparameterError(
                "data.files: expected files of records, as .jsonl, or files of plain "
                f"text; received both for {self.files!r}."
            )
        return kinds == {True}

    def _documents(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        yield from parts if self._of_records else _paragraphs(parts)

    def _paths(self) -> list[Path]:
        if self.files is None:
            root = Path(sysconfig.get_path("stdlib"))
            below = sorted(path.relative_to(root) for path in root.rglob("*.py"))
            return [root / path for path in below if not _SKIPPED & set(path.parts)]
        return files.matching_files("data.files", self.files, example="texts/**/*.txt")


def _bytes(path: Path) -> bytes:
    """Returns the bytes of a file; the kernel's, which may never end, have none.

    Raises:
        HyperparameterError: If it cannot be read.
    """
    try:
        return path.read_bytes() if path.stat().st_size else b""
    except OSError as error:
        raise HyperparameterError(
            f"data.files: expected files that can be read; received {path}: "
            f"{error.strerror}."
        ) from None


def _part(text: Any, split: str) -> Any:
    cut = len(text) * 9 // 10
    return text[:cut] if split == "train" else text[cut:]


def _paragraphs(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the paragraphs of each part, with the blank lines that end them."""
    for part in parts:
        yield from filter(None, re.split(rb"(?<=\n\n)(?=[^\n])", part))


START = BYTES.start


def pack(
    documents: Sequence[bytes | np.ndarray],
    *,
    size: int,
    start: int = START,
    dtype: np.dtype = BYTES.dtype,
) -> np.ndarray:
    """Returns documents in windows, `[num_windows, size]`.

    Args:
        documents: Bytes, or ids `[num_tokens]`, without `start`.
        size: Tokens of a window, at least 2: a start, and a token after it.
        start: The token that starts each chunk of a document, and pads windows.
        dtype: The type of the result, which bytes are of as they are.
    """
    room = size - 1  # Beside the start.
    chunks = [
        document[first : first + room]
        for document in documents
        for first in range(0, len(document), room)
    ]
    bins = best_fit([len(chunk) + 1 for chunk in chunks], size=size)
    windows = np.full([len(bins), size], start, dtype)
    for window, bin_ in zip(windows, bins, strict=True):
        at = 0
        for chunk in (chunks[i] for i in bin_):
            end = at + 1 + len(chunk)
            window[at + 1 : end] = np.frombuffer(chunk, dtype)
            at = end
    return windows


def best_fit(lengths: Sequence[int], *, size: int) -> list[list[int]]:
    """Returns bins of things whose lengths add up to `size` at most, by position.

    >>> best_fit([2, 3, 5, 4], size=7)
    [[2, 0], [3, 1]]

    Args:
        lengths: From 1 to `size`.
        size: The room in a bin.
    """
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(size + 1)]
    rooms = 0  # Bit r is set where a bin has room r left.
    for thing in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[thing]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # The least.
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = size, len(bins)
            bins.append([])
        bins[chosen].append(thing)
        by_room[room - length].append(chosen)
        rooms |= 1 << (room - length)
    return bins


class Windows(batches.Examples):
    """Windows of a text as examples, `(inputs, targets)`.

    Args:
        text: Tokens. # [num_tokens]
        length: Tokens of a window's inputs.
        stride: Tokens from the beginning of a window to that of the next.
    """

    def __init__(self, text: np.ndarray, *, length: int, stride: int = 1) -> None:
        self._text = text
        self._length = length
        self._stride = stride

    def __len__(self) -> int:
        return (len(self._text) - self._length - 1) // self._stride + 1

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the windows of these indices, `[num_indices, length]` each."""
        starts = self._stride * indices[:, None]
        window = self._text[starts + np.arange(self._length + 1)].astype(np.int32)
        return window[:, :-1], window[:, 1:]


def random_windows(
    text: np.ndarray,
    *,
    length: int,
    batch_size: int,
    steps: range,
    seed: int,
    shard: HostShard | None = None,
) -> tf.data.Dataset:
    """Returns one batch a step, a pure function of the text, the seed and the step.

    A window may begin at any token; windows overlap, and the same may be drawn again.

    Args:
        text: Tokens. # [num_tokens]
        length: Tokens of a window's inputs.
        batch_size: Windows in a batch.
        steps: The steps that batches are for.
        seed: Seed of the draws.
        shard: Windows of each batch that are read here.
    """
    import tensorflow as tf

    # The only copy: `batch` does not keep `text`.
    with tf.device(devices.host_device()):  # An accelerator has the model to compute.
        tensor = tf.constant(text)
    num_starts = len(text) - length

    def batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        starts = batches.draw_rows(
            step, batch_size=batch_size, below=num_starts, seed=seed, shard=shard
        )
        positions = starts[:, None] + tf.range(length + 1, dtype=tf.int64)
        window = tf.cast(tf.gather(tensor, positions), tf.int32)
        return window[:, :-1], window[:, 1:]

    return batches.map_steps(batch, steps)
