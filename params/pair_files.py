"""Pairs of your own: files of lines, each a source, a tab and a target."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from params import characters, files
from params.bad_records import BadRecordError, BadRecords
from params.characters import UTF8, Alphabet
from params.pairs import Pair, Pairs
from trainer.hyperparams import field


class PairFiles(Pairs):
    """Pairs in text files, which are UTF-8 whatever the locale."""

    alphabet: ClassVar[Alphabet] = UTF8

    files: str = field(default="", help="Glob of your files: SOURCE, a tab, TARGET.")
    longest_source: int = field(
        default=64, at_least=1, help="Most bytes of a source in UTF-8."
    )
    longest_target: int = field(
        default=64, at_least=1, help="Most bytes of a target in UTF-8."
    )
    max_bad_records: int = field(
        default=10, at_least=0, help="Lines that cannot be used before it is an error."
    )

    @property
    def source_length(self) -> int:
        """How many bytes a source has at most."""
        return self.longest_source

    @property
    def target_length(self) -> int:
        """How many bytes a target has at most."""
        return self.longest_target

    def every(self) -> Iterable[Pair]:
        """Returns all pairs, without the lines that are none.

        Raises:
            HyperparameterError: If there is no file, or too many lines are none.
        """
        paths = files.matching("data.files", self.files, example="pairs/*.tsv")
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
            raise BadRecordError(f"expected SOURCE, a tab, TARGET; received {line!r}")
        try:
            for text, length in (
                (source, self.longest_source),
                (target, self.longest_target),
            ):
                characters.encode([text], length=length, alphabet=self.alphabet)
        except ValueError as error:
            raise BadRecordError(str(error).removesuffix(".")) from None
        return Pair(source, target)
