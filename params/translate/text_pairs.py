"""Pairs of texts: a source and the target to make of it, as batches of numbers.

0 is padding, 1 starts what the decoder reads, 2 ends what it writes; the rest are the
bytes of UTF-8 that an alphabet has: in `ASCII` its printable characters, a space first.

>>> print(encode_texts(["on", "a"], length=3))
[[82 81  0]
 [68  0  0]]
>>> print(decode_text(np.array([82, 81, END, 68])))
on
>>> print(encode_texts(["ü"], length=3, alphabet=UTF8))
[[166 159   0]]

Every tenth target, by its checksum, is for validation, with all its sources: no
training has seen it.

A batch is `((source, shifted), target)`, `[batch_size, source_length]` and twice
`[batch_size, target_length]`. The target ends in an end; shifted, it begins with a
start and lacks its last place, so that each character is predicted from those before.
"""

from __future__ import annotations

import abc
import codecs
import dataclasses
import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import ClassVar, Literal

import numpy as np

from tfgpipe_params.image.sources import BadRecordError, BadRecords
from tfgpipe_trainer import files
from tfgpipe_trainer.hyperparams import Hyperparams, field

PADDING, START, END = range(3)
_NONE = 0xFF  # A byte that no text in UTF-8 has.


@dataclasses.dataclass(frozen=True)
class Alphabet:
    """Bytes that texts may have, those of UTF-8.

    Attributes:
        first: The first character.
        last: The last.
        name: Their name.
    """

    first: int
    last: int
    name: str

    @property
    def size(self) -> int:
        """Number of ids: bytes, padding, start and end."""
        return END + 1 + self.last - self.first + 1


ASCII = Alphabet(ord(" "), ord("~"), "printable characters of ASCII")
UTF8 = Alphabet(ord(" "), 255, "bytes of UTF-8, none of them a control character")


def encode_texts(
    texts: Sequence[str], *, length: int, alphabet: Alphabet = ASCII
) -> np.ndarray:
    """Returns texts as numbers, `[num_texts, length]` of type int32, padded at the end.

    Raises:
        ValueError: If a text is too long, or holds other characters.
    """
    numbers = np.full([len(texts), length], PADDING, np.int32)
    for row, text in zip(numbers, texts, strict=True):
        data = np.frombuffer(text.encode(), np.uint8).astype(int)
        known = (data >= alphabet.first) & (data <= alphabet.last)
        if len(data) > length or not known.all():
            raise ValueError(
                f"Expected at most {length} {alphabet.name}; received {_short(text)}."
            )
        row[: len(data)] = data - alphabet.first + END + 1
    return numbers


def decode_text(numbers: np.ndarray, alphabet: Alphabet = ASCII) -> str:
    """Returns the text of numbers, `[length]`, up to their end or padding."""
    ends = np.flatnonzero((numbers == END) | (numbers == PADDING))
    data = (numbers[: ends[0]] if len(ends) else numbers) + alphabet.first - END - 1
    # A model may write a start, which is no character, or a part of one alone.
    data = np.where(data < alphabet.first, _NONE, data)
    return data.astype(np.uint8).tobytes().decode(errors="replace")


def _short(text: str) -> str:
    rest = len(text) - 80
    return f"{text[:80]!r}" + (f" and {rest:,} characters more" if rest > 0 else "")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A source text and its target."""

    source: str
    target: str


class Pairs(Hyperparams, abc.ABC):
    """Pairs to learn from."""

    alphabet: ClassVar[Alphabet] = ASCII

    @property
    @abc.abstractmethod
    def source_length(self) -> int:
        """Upper bound of a source's length, in characters."""

    @property
    @abc.abstractmethod
    def target_length(self) -> int:
        """Upper bound of a target's length, in characters."""

    @abc.abstractmethod
    def all(self) -> Iterable[Pair]:
        """Returns all of them."""

    def read(self, split: Literal["train", "validation"]) -> tuple[Pair, ...]:
        """Returns the pairs of a split."""
        return _splits(self)[split == "validation"]


@functools.cache
def _splits(pairs: Pairs) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Returns the pairs of training and of validation, made or read once for both."""
    split: tuple[list[Pair], list[Pair]] = ([], [])
    for pair in pairs.all():
        split[zlib.crc32(pair.target.encode()) % 10 == 0].append(pair)
    return tuple(split[0]), tuple(split[1])


class SyntheticPairs(Pairs):
    """A task of the program's own, as many pairs as are asked for."""

    num_pairs: int = field(
        default=50_000,
        at_least=1,
        help="Number of pairs, a tenth of them for validation.",
    )
    seed: int = field(
        default=0, at_least=0, help="Seed of the pairs, apart from the run's seed."
    )

    @abc.abstractmethod
    def draw(self, random: Random) -> Pair:
        """Returns a random pair."""

    def pair(self, index: int) -> Pair:
        """Returns one of the pairs, a function of seed and index alone."""
        return self.draw(Random(f"{self.seed} {index}"))

    def all(self) -> Iterable[Pair]:
        """Returns all pairs."""
        return map(self.pair, range(self.num_pairs))


class PairFiles(Pairs):
    """Pairs in text files, which are UTF-8 whatever the locale."""

    alphabet: ClassVar[Alphabet] = UTF8

    files: str = field(default="", help="Glob of text files: SOURCE, a tab, TARGET.")
    longest_source: int = field(
        default=64, at_least=1, help="Maximum source length in bytes of UTF-8."
    )
    longest_target: int = field(
        default=64, at_least=1, help="Maximum target length in bytes of UTF-8."
    )
    max_bad_records: int = field(
        default=10, at_least=0, help="Maximum number of unusable lines."
    )

    @property
    def source_length(self) -> int:
        """Upper bound of a source's length, in bytes."""
        return self.longest_source

    @property
    def target_length(self) -> int:
        """Upper bound of a target's length, in bytes."""
        return self.longest_target

    def all(self) -> Iterable[Pair]:
        """Returns all pairs, without the lines that are none.

        Raises:
            HyperparameterError: If there is no file, or too many lines are none.
        """
        paths = files.matching_files("data.files", self.files, example="pairs/*.tsv")
        bad = BadRecords(self.max_bad_records)
        return [pair for path in paths for pair in self._of_file(path, bad)]

    def _of_file(self, path: Path, bad: BadRecords) -> Iterator[Pair]:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                # Windows begins files of UTF-8 with a mark.
                data = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                try:
                    yield self._pair(data.rstrip(b"\r\n"))
                except BadRecordError as error:
                    bad.add(f"{path} line {number}", str(error))

    def _pair(self, data: bytes) -> Pair:
        try:
            line = data.decode()
        except UnicodeDecodeError as error:
            raise BadRecordError(f"expected UTF-8; received {error}") from None
        source, tab, target = line.partition("\t")
        if not (source and tab and target):
            raise BadRecordError(
                f"expected SOURCE, a tab, TARGET; received {_short(line)}"
            )
        try:
            for text, length in (
                (source, self.longest_source),
                (target, self.longest_target),
            ):
                encode_texts([text], length=length, alphabet=self.alphabet)
        except ValueError as error:
            raise BadRecordError(str(error).removesuffix(".")) from None
        return Pair(source, target)


@dataclasses.dataclass(frozen=True)
class PairArrays:
    """Pairs as numbers.

    Attributes:
        source: `[num_pairs, source_length]`
        shifted: The decoder's inputs, `[num_pairs, target_length]`.
        target: The decoder's targets, `[num_pairs, target_length]`.
    """

    source: np.ndarray
    shifted: np.ndarray
    target: np.ndarray


def encode_pairs(
    pairs: Sequence[Pair],
    *,
    source_length: int,
    target_length: int,
    alphabet: Alphabet = ASCII,
) -> PairArrays:
    """Returns pairs as numbers; `target_length` counts the end."""
    source = encode_texts(
        [pair.source for pair in pairs], length=source_length, alphabet=alphabet
    )
    text = encode_texts(
        [pair.target for pair in pairs], length=target_length - 1, alphabet=alphabet
    )
    target = np.pad(text, [[0, 0], [0, 1]])
    ends = (text != PADDING).sum(axis=1)
    target[np.arange(len(pairs)), ends] = END
    shifted = np.pad(text, [[0, 0], [1, 0]], constant_values=START)
    return PairArrays(source, shifted, target)
