"""Random access to examples: how many there are, and each by its number.

The number is known before any is read, so that the order of training can be drawn.
What cannot be used raises `BadRecordError`: it is counted and named, another example is
taken in its place, and too many of them end the run.
"""

from __future__ import annotations

import abc
import bisect
import fcntl
import itertools
import json
import os
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfgpipe_trainer.hyperparams import HyperparameterError

_NAMED = 10


class BadRecordError(ValueError):
    """A record cannot be used; the message says why, without naming the record."""


class BadRecords:
    """The bad records that a run has come across, each counted once.

    Processes that read examples get a copy of this and count together, by a file that
    is there from the first bad record on. The first ten are named on stderr as they are
    found. All of them are only known once all records have been read, so a run that is
    taken up counts from the start again.

    Args:
        limit: Largest number of bad records.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # Batches are read side by side.
        self._found: dict[str, str] = {}
        self._path = Path(tempfile.gettempdir()) / f"bad-records-{uuid.uuid4().hex}"
        weakref.finalize(self, self._path.unlink, missing_ok=True)

    def __len__(self) -> int:
        return len(self._found)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state that a process that reads examples gets."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @property
    def first(self) -> list[str]:
        """The first ten, as `"FILE record NUMBER: reason"`."""
        named = list(self._found.items())[:_NAMED]
        return [f"{name}: {reason}" for name, reason in named]

    def add(self, name: str, reason: str) -> None:
        """Counts a record, if it is a new one.

        Raises:
            HyperparameterError: If there are more than the limit.
        """
        with self._lock:
            if name not in self._found:
                self._add(name, reason)
            if len(self._found) > self._limit:
                raise HyperparameterError(
                    f"data.max_bad_records: expected at most {self._limit} bad "
                    f"records; received {len(self._found)}, of which the first are\n"
                    + "".join(f"  {line}\n" for line in self.first)
                    + "Mend or remove them, or raise data.max_bad_records."
                )

    def _add(self, name: str, reason: str) -> None:
        """Adds a record to what all processes have found."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # Until the file is closed.
            self._found = dict(json.loads(line) for line in file)
            if name in self._found:
                return
            self._found[name] = reason
            file.write(json.dumps([name, reason]) + "\n")
        if len(self._found) <= _NAMED:
            print(
                f"Bad record, not used: {name}: {reason}.", file=sys.stderr, flush=True
            )


class Source(abc.ABC):
    """Images, each under a number and with what it shows."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def name(self, number: int) -> str:
        """Names a record: its file, its number there."""

    @abc.abstractmethod
    def read(self, number: int) -> tuple[np.ndarray, Any]:
        """Returns pixels from 0 to 1, `[height, width, channels]`, and what is shown.

        That is a label, or a mask of classes, `[height, width]`, as big as the image.

        Raises:
            BadRecordError: If the record cannot be used.
        """


class Arrays(Source):
    """Images in memory, such as those of `.npz` files.

    Args:
        pixels: `[num_images, height, width, channels]`, or without channels, integers
            or floats, as `from_0_to_1` takes them.
        labels: `[num_images]`, integers.
        name: The name of the arrays, in messages.
    """

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, *, name: str) -> None:
        self._pixels = pixels if pixels.ndim > 3 else pixels[..., None]
        self._labels = labels
        self._name = name

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, number: int) -> str:
        """Returns the name of the array, and the row."""
        return f"{self._name} record {number}"

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Returns a row."""
        return from_0_to_1(self._pixels[number]), int(self._labels[number])


class Joined(Source):
    """Sources one after another."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._ends = list(itertools.accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self._ends[-1]

    def name(self, number: int) -> str:
        """Returns the name that the record's own source gives it."""
        source, inner = self._find(number)
        return source.name(inner)

    def read(self, number: int) -> tuple[np.ndarray, Any]:
        """Reads a record from its own source."""
        source, inner = self._find(number)
        return source.read(inner)

    def _find(self, number: int) -> tuple[Source, int]:
        which = bisect.bisect_right(self._ends, number)
        before = self._ends[which - 1] if which else 0
        return self._sources[which], number - before


class Subset(Source):
    """Some records of a source."""

    def __init__(self, source: Source, numbers: np.ndarray) -> None:
        self._source = source
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def name(self, number: int) -> str:
        """Returns the name that the record has in the source."""
        return self._source.name(int(self._numbers[number]))

    def read(self, number: int) -> tuple[np.ndarray, Any]:
        """Reads a record of the source."""
        return self._source.read(int(self._numbers[number]))


def every_tenth(source: Source, split: str) -> Source:
    """Returns the records that are for a split: every tenth is for validation.

    Raises:
        HyperparameterError: If there is none.
    """
    numbers = np.arange(len(source))
    kept = numbers[(numbers % 10 == 9) == (split == "validation")]
    if not len(kept):
        raise HyperparameterError(
            "data.files: expected at least 10 images, every tenth for validation; "
            f"received {len(source)}. Or name others as data.validation_files."
        )
    return Subset(source, kept)


def from_0_to_1(pixels: np.ndarray) -> np.ndarray:
    """Returns pixels from 0 to 1: integers over 255, uint16 over 65,535, floats as is.

    Raises:
        BadRecordError: If `check_pixels` does.
    """
    check_pixels(pixels)
    if pixels.dtype.kind in "fb":
        return pixels.astype(np.float32)
    full = 65535 if pixels.dtype.type is np.uint16 else 255
    return pixels.astype(np.float32) / np.float32(full)


def check_pixels(pixels: np.ndarray) -> None:
    """Checks that it is known which number of pixels is the brightest.

    Integers of a wider type than uint8 are what arithmetic makes of that, so they are
    to hold such values; only uint16 has values of its own.

    Raises:
        BadRecordError: If not.
    """
    kind = pixels.dtype
    if kind.kind not in "biuf":
        raise BadRecordError(f"expected pixels as numbers; received pixels of {kind}")
    # A type is that of either order of bytes.
    if kind.kind in "iu" and kind.type not in (np.uint8, np.uint16) and pixels.size:
        least, most = pixels.min(), pixels.max()
        if least < 0 or most > 255:
            raise BadRecordError(
                f"expected pixels of type {kind} from 0 to 255; received some from "
                f"{least} to {most}. Store them as uint16, or as floats from 0 to 1"
            )
