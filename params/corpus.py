"""A corpus: files read as bytes, split into training and validation text."""

from __future__ import annotations

import glob
import os
import sysconfig
from pathlib import Path
from typing import Literal

import numpy as np

from tfgpipe.hyperparams import HyperparameterError, Hyperparams, field

# Tests repeat themselves, and what others have installed differs between machines.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


class Corpus(Hyperparams):
    """The bytes of text files, by default the source of Python's standard library.

    Every tenth file is for validation. Fewer than ten files are each cut, the last
    tenth of their bytes for validation.
    """

    files: str | None = field(
        default=None, help="Glob of your files; None: Python's standard library."
    )

    def read(self, split: Literal["train", "validation"]) -> np.ndarray:
        """Returns the bytes of a split, `[num_bytes]` of type uint8.

        Raises:
            HyperparameterError: If `files` matches no file.
        """
        paths = self._paths()
        if len(paths) < 10:
            parts = [_part(path.read_bytes(), split) for path in paths]
        else:
            validation = paths[::10]
            parts = [
                path.read_bytes()
                for path in paths
                if (path in validation) == (split == "validation")
            ]
        return np.frombuffer(b"\n".join(parts), np.uint8)

    def _paths(self) -> list[Path]:
        if self.files is None:
            root = Path(sysconfig.get_path("stdlib"))
            below = sorted(path.relative_to(root) for path in root.rglob("*.py"))
            return [root / path for path in below if not _SKIPPED & set(path.parts)]
        pattern = os.path.expanduser(self.files)
        names = sorted(glob.glob(pattern, recursive=True))
        paths = [Path(name) for name in names if os.path.isfile(name)]
        if not paths:
            raise HyperparameterError(
                f"data.files: expected a glob that matches files, such as "
                f"'texts/**/*.txt'; received {self.files!r}, which matches none."
            )
        return paths


def _part(text: bytes, split: str) -> bytes:
    cut = len(text) * 9 // 10
    return text[:cut] if split == "train" else text[cut:]
