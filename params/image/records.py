"""Images in files of records, each with a label, under keys such as `image`.

Of Parquet and Hugging Face an image is bytes, or has `bytes`, as `datasets` stores it;
a record of ArrayRecord is a `tf.train.Example` of an image.
"""

from __future__ import annotations

import abc
import bisect
import functools
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfgpipe_params.image.formats import decode_image, read_example
from tfgpipe_params.image.sources import BadRecordError, Source
from tfgpipe_trainer import files
from tfgpipe_trainer.hyperparams import HyperparameterError

_READING = threading.Lock()


class RecordImages(Source):
    """Images in a file that some package reads, each with a label.

    Args:
        path: The file.
        image_key: The key, or column, of the images.
        label_key: The key, or column, of the labels, integers.
    """

    def __init__(self, path: Path, *, image_key: str, label_key: str) -> None:
        self._path, self._keys = path, (image_key, label_key)
        self._size = self._count()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state that a process that reads examples gets: no open files."""
        return {
            name: value
            for name, value in vars(self).items()
            if not isinstance(
                getattr(type(self), name, None), functools.cached_property
            )
        }

    @abc.abstractmethod
    def _count(self) -> int:
        """Returns the number of records, of which each has both keys."""

    def _check_columns(self, names: Sequence[str]) -> None:
        if {*self._keys} - {*names}:
            image_key, label_key = self._keys
            raise HyperparameterError(
                f"data.files: expected columns {image_key!r} and {label_key!r}; "
                f"received {self._path}, which has {', '.join(names)}. Others are "
                "named by data.image_key and data.label_key."
            )

    def __len__(self) -> int:
        return self._size

    def name(self, number: int) -> str:
        """Returns the file, and the record's number in it."""
        return f"{self._path} record {number}"


class ParquetImages(RecordImages):
    """Images in the rows of a Parquet file."""

    @functools.cached_property
    def _file(self) -> Any:
        return files.parquet(self._path)

    @functools.cached_property
    def _ends(self) -> list[int]:
        """The number of rows up to the end of each group."""
        data = self._file.metadata
        sizes = (data.row_group(i).num_rows for i in range(data.num_row_groups))
        return list(itertools.accumulate(sizes))

    def _count(self) -> int:
        self._check_columns(self._file.schema_arrow.names)
        return self._ends[-1] if self._ends else 0

    @functools.cached_property
    def _rows(self) -> Any:
        # Rows are read by group; that of the last few is kept.
        @functools.lru_cache(maxsize=4)
        def rows(group: int) -> list[tuple[Any, Any]]:
            with _READING:  # A file is read by one thread at a time.
                table = self._file.read_row_group(
                    group, columns=list(self._keys), use_threads=False
                )
            columns = (table.column(key).to_pylist() for key in self._keys)
            return list(zip(*columns, strict=True))

        return rows

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Returns a decoded row."""
        group = bisect.bisect_right(self._ends, number)
        before = self._ends[group - 1] if group else 0
        image, label = self._rows(group)[number - before]
        return _image(image), _label(label)


class ArrayRecordImages(RecordImages):
    """Images in an ArrayRecord file of `tf.train.Example`s."""

    @functools.cached_property
    def _reader(self) -> Any:
        return files.array_record(self._path)

    def _count(self) -> int:
        return self._reader.num_records()

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Returns a decoded example."""
        (data,) = self._reader.read([number])
        return read_example(data, *self._keys)


class HuggingFaceImages(RecordImages):
    """Images in a file that Hugging Face's `datasets` has saved to disk."""

    @functools.cached_property
    def _rows(self) -> Any:
        # As they are stored: its own decoding needs Pillow.
        return files.hugging_face(self._path).with_format("arrow")

    def _count(self) -> int:
        self._check_columns(self._rows.column_names)
        return len(self._rows)

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Returns a decoded row."""
        row = self._rows[number]
        image, label = (row.column(key)[0].as_py() for key in self._keys)
        return _image(image), _label(label)


def _image(found: Any) -> np.ndarray:
    if isinstance(found, dict) and found.get("bytes") is not None:
        found = found["bytes"]
    if isinstance(found, bytes):
        return decode_image(found)
    raise BadRecordError("expected an encoded image as bytes")


def _label(found: Any) -> int:
    if not isinstance(found, int):
        raise BadRecordError(f"expected an integer as label; received {found!r}")
    return found
