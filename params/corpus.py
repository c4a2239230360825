"""A corpus: files read as bytes, split into training and validation text."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Literal

import numpy as np

from params import files
from trainer.hyperparams import HyperparameterError, Hyperparams, field

# Tests repeat themselves, and what others have installed differs between machines.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


class Corpus(Hyperparams):
    """The bytes of text files, by default the source of Python's standard library.

    Every tenth file is for validation. Fewer than ten files are each cut, the last
    tenth of their bytes for validation. Documents are paragraphs, which blank lines
    end: of a program the functions, about.
    """

    files: str | None = field(
        default=None, help="Glob of your files; None: Python's standard library."
    )
    documents: Literal["joined", "packed"] = field(
        default="joined", help="packed: paragraphs that do not see each other."
    )

    def read(self, split: Literal["train", "validation"]) -> np.ndarray:
        """Returns the bytes of a split, `[num_bytes]` of type uint8.

        Raises:
            HyperparameterError: If `files` matches no file.
        """
        return np.frombuffer(b"\n".join(self._parts(split)), np.uint8)

    def read_documents(self, split: Literal["train", "validation"]) -> list[bytes]:
        """Returns the documents of a split, none of which holds a zero byte.

        Raises:
            HyperparameterError: If `files` matches no file, or one holds a zero byte.
        """
        parts = self._parts(split)
        if any(b"\0" in part for part in parts):
            raise HyperparameterError(
                "data.files: expected text without zero bytes, which start packed "
                "documents; received a file that has some. Leave it out, or try "
                "data.documents=joined."
            )
        return [
            document
            for part in parts
            for document in re.split(rb"(?<=\n\n)(?=[^\n])", part)
            if document
        ]

    def _parts(self, split: str) -> list[bytes]:
        """Returns what of each file is for a split."""
        paths = self._paths()
        if len(paths) < 10:
            return [_part(path.read_bytes(), split) for path in paths]
        return [
            path.read_bytes()
            for number, path in enumerate(paths)
            if (number % 10 == 0) == (split == "validation")
        ]

    def _paths(self) -> list[Path]:
        if self.files is None:
            root = Path(sysconfig.get_path("stdlib"))
            below = sorted(path.relative_to(root) for path in root.rglob("*.py"))
            return [root / path for path in below if not _SKIPPED & set(path.parts)]
        return files.matching("data.files", self.files, example="texts/**/*.txt")


def _part(text: bytes, split: str) -> bytes:
    cut = len(text) * 9 // 10
    return text[:cut] if split == "train" else text[cut:]
