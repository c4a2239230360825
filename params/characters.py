"""Texts as numbers: what an encoder-decoder reads, and what it writes.

0 is padding, 1 starts what the decoder reads, 2 ends what it writes; the rest are the
bytes of UTF-8 that an alphabet has: in `ASCII` its printable characters, a space first.

>>> print(encode(["on", "a"], length=3))
[[82 81  0]
 [68  0  0]]
>>> print(decode(np.array([82, 81, END, 68])))
on
>>> print(encode(["\u00fc"], length=3, alphabet=UTF8))
[[166 159   0]]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

PADDING, START, END = range(3)
_NONE = 0xFF  # A byte that no text in UTF-8 has.


@dataclasses.dataclass(frozen=True)
class Alphabet:
    """Bytes that texts may have, those of UTF-8.

    Attributes:
        first: The first of them.
        last: The last.
        name: What they are called.
    """

    first: int
    last: int
    name: str

    @property
    def size(self) -> int:
        """How many numbers there are: bytes, padding, start and end."""
        return END + 1 + self.last - self.first + 1


ASCII = Alphabet(ord(" "), ord("~"), "printable characters of ASCII")
UTF8 = Alphabet(ord(" "), 255, "bytes of UTF-8, none of them a control character")


def encode(
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
                f"Expected at most {length} {alphabet.name}; received {text!r}."
            )
        row[: len(data)] = data - alphabet.first + END + 1
    return numbers


def decode(numbers: np.ndarray, alphabet: Alphabet = ASCII) -> str:
    """Returns the text of numbers, `[length]`, up to their end or padding."""
    ends = np.flatnonzero((numbers == END) | (numbers == PADDING))
    data = (numbers[: ends[0]] if len(ends) else numbers) + alphabet.first - END - 1
    # A model may write a start, which is no character, or a part of one alone.
    data = np.where(data < alphabet.first, _NONE, data)
    return data.astype(np.uint8).tobytes().decode(errors="replace")
