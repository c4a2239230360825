"""Pairs of texts: a source, and the target to make of it.

Every tenth target, by its checksum, is for validation, with all its sources: no
training has seen it. Those made by the program are functions of a seed and an index.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import zlib
from collections.abc import Iterable
from random import Random
from typing import ClassVar, Literal

from params.characters import ASCII, Alphabet
from trainer.hyperparams import Hyperparams, field


@dataclasses.dataclass(frozen=True)
class Pair:
    """What is given, and what is wanted."""

    source: str
    target: str


class Pairs(Hyperparams, abc.ABC):
    """Pairs to learn from."""

    alphabet: ClassVar[Alphabet] = ASCII

    @property
    @abc.abstractmethod
    def source_length(self) -> int:
        """How many characters the longest source has, at most."""

    @property
    @abc.abstractmethod
    def target_length(self) -> int:
        """How many characters the longest target has, at most."""

    @abc.abstractmethod
    def every(self) -> Iterable[Pair]:
        """Returns all of them."""

    def read(self, split: Literal["train", "validation"]) -> tuple[Pair, ...]:
        """Returns the pairs of a split."""
        return _splits(self)[split == "validation"]


@functools.cache
def _splits(pairs: Pairs) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Returns the pairs of training and of validation, made or read once for both."""
    split: tuple[list[Pair], list[Pair]] = ([], [])
    for pair in pairs.every():
        split[zlib.crc32(pair.target.encode()) % 10 == 0].append(pair)
    return tuple(split[0]), tuple(split[1])


class MadePairs(Pairs):
    """A task of the program's own, as many pairs as are asked for."""

    num_pairs: int = field(
        default=50_000, at_least=1, help="Pairs, a tenth of them for validation."
    )
    seed: int = field(
        default=0, at_least=0, help="Seed of the pairs; runs of all seeds share them."
    )

    @abc.abstractmethod
    def draw(self, random: Random) -> Pair:
        """Returns a random pair."""

    def pair(self, index: int) -> Pair:
        """Returns one of the pairs, a function of seed and index alone."""
        return self.draw(Random(f"{self.seed} {index}"))

    def every(self) -> Iterable[Pair]:
        """Returns all pairs."""
        return map(self.pair, range(self.num_pairs))
