r"""Text: files as bytes, windows cut from them, documents packed into windows.

A window is `(inputs, targets)`, `[batch_size, length]` each, `targets` one byte further
on. Documents may be packed: many short ones in one window, long ones in pieces.

    \0 a d o c u m e n t \0 a n o t h e r \0 0 1 \0 \0 \0     one window

A zero starts each piece, and fills up the end. The longest pieces are placed first,
each in the window that it fills best: "best-fit decreasing", as of Ding et al. 2024,
"Fewer Truncations Improve Language Modeling". Only documents longer than a window are
cut.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from trainer.data import batches, sources
from trainer.data.batches import HostShard
from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import tensorflow as tf


# Tests repeat themselves, and what others have installed differs between machines.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


class Corpus(Hyperparams):
    """The bytes of text files, by default the source of Python's standard library.

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
        return sources.matching_files(
            "data.files", self.files, example="texts/**/*.txt"
        )


def _part(text: bytes, split: str) -> bytes:
    cut = len(text) * 9 // 10
    return text[:cut] if split == "train" else text[cut:]


START = 0


def pack(documents: Sequence[bytes], *, size: int) -> np.ndarray:
    """Returns documents in windows, `[num_windows, size]` of type uint8.

    Args:
        documents: Without zeros.
        size: Bytes of a window, at least 2: a start, and a byte after it.
    """
    room = size - 1  # Beside the start.
    pieces = [
        document[first : first + room]
        for document in documents
        for first in range(0, len(document), room)
    ]
    bins = best_fit([len(piece) + 1 for piece in pieces], size=size)
    rows = [
        b"".join(b"\0" + pieces[i] for i in bin_).ljust(size, b"\0") for bin_ in bins
    ]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, size)


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


def random_windows(
    text: np.ndarray,
    *,
    length: int,
    batch_size: int,
    steps: range,
    seed: int,
    stride: int = 1,
    shard: HostShard | None = None,
) -> tf.data.Dataset:
    """Returns one batch a step, a pure function of the text, the seed and the step.

    Args:
        text: Bytes. # [num_bytes]
        length: Bytes of a window's inputs.
        batch_size: Windows in a batch.
        steps: The steps that batches are for.
        seed: Seed of the draws.
        stride: Bytes from where a window may begin to where the next may.
        shard: Which windows of each batch are read here.
    """
    import tensorflow as tf

    tensor = tf.constant(text)

    def batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        last = (len(text) - length - 1) // stride
        starts = batches.draw_rows(
            step, batch_size=batch_size, below=last + 1, seed=seed, shard=shard
        )
        return _cut(tensor, stride * starts, length)

    return batches.map_steps(batch, steps)


def even_windows(
    text: np.ndarray, *, length: int, batch_size: int, num_batches: int, stride: int = 1
) -> tf.data.Dataset:
    """Returns batches of windows spread evenly over the whole text."""
    import tensorflow as tf

    tensor = tf.constant(text)
    last = (len(text) - length - 1) // stride
    starts = np.linspace(0, last, num_batches * batch_size).astype(np.int64) * stride
    dataset = tf.data.Dataset.from_tensor_slices(starts.reshape(num_batches, -1))
    return dataset.map(lambda row: _cut(tensor, row, length)).prefetch(2)


def _cut(
    text: tf.Tensor, starts: tf.Tensor, length: int
) -> tuple[tf.Tensor, tf.Tensor]:
    import tensorflow as tf

    positions = starts[:, None] + tf.range(length + 1, dtype=tf.int64)
    window = tf.cast(tf.gather(text, positions), tf.int32)
    return window[:, :-1], window[:, 1:]
