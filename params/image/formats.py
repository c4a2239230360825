"""Images in files: TFRecord, a folder for each label, TensorFlow Datasets.

A TFRecord file is records one after another, numbers in it lowest byte first:

    length   uint64     of the data, in bytes
    check    uint32     masked CRC-32C of the 8 bytes before
    data     bytes
    check    uint32     masked CRC-32C of the data

`scan_records` reads the lengths alone, so records are then read in any order. A record
whose own check fails, or that the file ends in the middle of, is found when it is read,
so that one bad record does not cost the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfgpipe_params.image.sources import BadRecordError, Source, from_0_to_1
from tfgpipe_trainer.hyperparams import HyperparameterError


class TfRecords(Source):
    """A TFRecord file of `tf.train.Example`s, each with an encoded image and a label.

    Args:
        path: The file.
        image_key: The feature that is the image, encoded as PNG, JPEG, BMP or GIF.
        label_key: The feature that is the label, an integer.
    """

    def __init__(self, path: Path, *, image_key: str, label_key: str) -> None:
        self._path = path
        self._keys = (image_key, label_key)
        self._places = scan_records(path)

    def __len__(self) -> int:
        return len(self._places)

    def name(self, number: int) -> str:
        """Returns the file, and the record's number in it."""
        return f"{self._path} record {number}"

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Returns a decoded example."""
        data = read_record(self._path, self._places[number])
        return read_example(data, *self._keys)


def read_example(data: bytes, image_key: str, label_key: str) -> tuple[np.ndarray, int]:
    """Returns the image and the label of a `tf.train.Example`.

    Raises:
        BadRecordError: If it is none, or has no such features.
    """
    import tensorflow as tf

    try:
        features = tf.train.Example.FromString(data).features.feature
    except Exception:  # Protocol buffers have an error class of their own.
        raise BadRecordError("it is no tf.train.Example") from None
    names = ", ".join(sorted(features))  # Asking for one would add it.
    image, label = features[image_key], features[label_key]
    if not image.bytes_list.value or not label.int64_list.value:
        raise BadRecordError(
            f"expected bytes {image_key!r} and an integer {label_key!r} in it; "
            f"received {names or 'nothing'}"
        )
    return decode_image(image.bytes_list.value[0]), label.int64_list.value[0]


class Folders(Source):
    """Image files, the name of the folder that each is in being its label.

    Args:
        paths: The files.
        labels: Names of the folders, in the order of their numbers.
    """

    def __init__(self, paths: Sequence[Path], *, labels: Sequence[str]) -> None:
        self._paths = paths
        self._labels = {label: number for number, label in enumerate(labels)}

    def __len__(self) -> int:
        return len(self._paths)

    def name(self, number: int) -> str:
        """Returns the file."""
        return str(self._paths[number])

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Returns a decoded file."""
        path = self._paths[number]
        data = read_file(path)
        label = path.parent.name
        if label not in self._labels:
            raise BadRecordError(
                f"expected a folder as of training, one of {', '.join(self._labels)}"
            )
        return decode_image(data), self._labels[label]


def decode_image(data: bytes) -> np.ndarray:
    """Returns an encoded image from 0 to 1, `[height, width, channels]`, of float32.

    Raises:
        BadRecordError: If it cannot be decoded.
    """
    return from_0_to_1(read_image(data))


def read_image(data: bytes) -> np.ndarray:
    """Returns an encoded image as it is stored, `[height, width, channels]`.

    Raises:
        BadRecordError: If it cannot be decoded.
    """
    import tensorflow as tf

    try:
        return tf.io.decode_image(data, expand_animations=False).numpy()
    except tf.errors.OpError:
        raise BadRecordError(
            f"expected an image as PNG, JPEG, BMP or GIF; received {len(data)} bytes "
            "that are none"
        ) from None


def read_file(path: Path) -> bytes:
    """Returns the bytes of a file.

    Raises:
        BadRecordError: If it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadRecordError(f"it cannot be read: {error.strerror}") from None


_HEADER = struct.Struct("<QI")
_CHECK = struct.Struct("<I")
_GZIP = b"\x1f\x8b"  # What files of gzip begin with; those are read in order alone.


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a record's data in its file.

    Attributes:
        start: The first byte.
        length: Number of bytes, or None if its length cannot be read.
    """

    start: int
    length: int | None


def scan_records(path: Path) -> list[Place]:
    """Returns the places of a file's records.

    After a length that cannot be read nothing more can be found, so it is the last.

    Raises:
        HyperparameterError: If the file cannot be read, or is no TFRecord file.
    """
    places: list[Place] = []
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = 0
            while start < size:
                file.seek(start)
                length = _length(file.read(_HEADER.size))
                start += _HEADER.size
                places.append(Place(start, length))
                if length is None:
                    break
                start += length + _CHECK.size
    except OSError as error:
        raise HyperparameterError(
            f"data.files: expected files that can be read; received {path}: "
            f"{error.strerror}."
        ) from None
    if not places or places[0].length is None:
        what = "does not begin as one does" if places else "is empty"
        with path.open("rb") as file:
            if file.read(2) == _GZIP:
                what = "is compressed by gzip: `gunzip` makes it one that is not"
        raise HyperparameterError(
            f"data.files: expected TFRecord files, not compressed; received {path}, "
            f"which {what}. Other kinds of files are named by data.format."
        )
    return places


def read_record(path: Path, place: Place) -> bytes:
    """Returns the data of a record.

    Raises:
        BadRecordError: If it is not what was written.
    """
    if place.length is None:
        raise BadRecordError(
            "its length does not fit its check; what follows it is not read"
        )
    size = place.length + _CHECK.size
    # A wrong length must not allocate more than the file has.
    if path.stat().st_size - place.start < size:
        raise BadRecordError("the file ends in the middle of it")
    with path.open("rb") as file:
        file.seek(place.start)
        raw = file.read(size)
    data, (check,) = raw[: place.length], _CHECK.unpack(raw[place.length :])
    if masked_crc32c(data) != check:
        raise BadRecordError("its data does not fit its check")
    return data


def masked_crc32c(data: bytes) -> int:
    """Returns a CRC-32C as TFRecord files store it: rotated, with a constant added.

    So does `Mask` in TensorFlow's `core/lib/hash/crc32c.h`.

    Raises:
        HyperparameterError: If google-crc32c is not installed.
    """
    try:
        from google_crc32c import value
    except ImportError:
        raise HyperparameterError(
            "data.format: expected the package google-crc32c for 'tfrecord'; received "
            "an environment without. `pip install google-crc32c` brings it; npz and "
            "folders do without."
        ) from None
    crc = value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _length(header: bytes) -> int | None:
    if len(header) < _HEADER.size:
        return None
    length, check = _HEADER.unpack(header)
    return length if masked_crc32c(header[:8]) == check else None


class Tfds(Source):
    """A data set of TensorFlow Datasets, prepared for random access.

    Args:
        name: Its name and its split, such as `"mnist#train"`.
        image_key: The feature that is the image.
        label_key: The feature that is the label.
    """

    def __init__(self, name: str, *, image_key: str, label_key: str) -> None:
        self._name = name
        self._keys = (image_key, label_key)
        self._rows = _tfds_rows(name)

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, number: int) -> str:
        """Returns the data set, and the row."""
        return f"{self._name} record {number}"

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Returns a row."""
        row = self._rows[number]
        absent = [key for key in self._keys if key not in row]
        if absent:
            raise BadRecordError(
                f"expected {absent[0]!r} in it; received {', '.join(sorted(row))}"
            )
        image, label = (row[key] for key in self._keys)
        if not np.issubdtype(np.asarray(label).dtype, np.integer):
            raise BadRecordError(
                f"expected an integer {self._keys[1]!r} in it; received {label}"
            )
        return from_0_to_1(np.asarray(image)), int(label)


@functools.cache
def _tfds_rows(name: str) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise HyperparameterError(
            "data.format: expected the package tensorflow_datasets for 'tfds'; "
            "received an environment without. `pip install tensorflow-datasets` brings "
            "it; tfrecord, npz and folders do without."
        ) from None
    dataset, _, split = name.partition("#")
    try:
        return tfds.data_source(dataset, split=split or "train")
    except Exception as error:  # A class for each way in which it may fail.
        reason = str(error).strip().partition("\n")[0]
        raise HyperparameterError(
            f"data.files: expected a data set of TensorFlow Datasets, such as "
            f"'mnist#train'; received {name!r}: {reason}"
        ) from None
