"""TFRecord files, read in any order: where each record is, then one record at a time.

A file is records one after another, numbers in it lowest byte first:

    length   uint64     of the data, in bytes
    check    uint32     masked CRC-32C of the 8 bytes before
    data     bytes
    check    uint32     masked CRC-32C of the data

`scan` reads the lengths alone. A record whose own check fails, or that the file ends in
the middle of, is found when it is read, so that one bad record does not cost the rest.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from pathlib import Path

from params import crc32c
from params.bad_records import BadRecordError
from trainer.hyperparams import HyperparameterError

_HEADER = struct.Struct("<QI")
_CHECK = struct.Struct("<I")
_GZIP = b"\x1f\x8b"  # What files of gzip begin with; those are read in order alone.


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the data of a record is in its file.

    Attributes:
        start: The first byte.
        length: Number of bytes, or None if its length cannot be read.
    """

    start: int
    length: int | None


def scan(path: Path) -> list[Place]:
    """Returns where the records of a file are.

    After a length that cannot be read nothing more can be found, so it is the last.

    Raises:
        HyperparameterError: If the file cannot be read, or is no TFRecord file.
    """
    places: list[Place] = []
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
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


def read(path: Path, place: Place) -> bytes:
    """Returns the data of a record.

    Raises:
        BadRecordError: If it is not what was written.
    """
    if place.length is None:
        raise BadRecordError(
            "its length does not fit its check; what follows it is not read"
        )
    size = place.length + _CHECK.size
    file = os.open(path, os.O_RDONLY)
    try:
        # A length that lies must not make room for more than there is.
        left = os.fstat(file).st_size - place.start
        if left < size:
            raise BadRecordError("the file ends in the middle of it")
        raw = os.pread(file, size, place.start)
    finally:
        os.close(file)
    data, (check,) = raw[: place.length], _CHECK.unpack(raw[place.length :])
    if crc32c.masked(data) != check:
        raise BadRecordError("its data does not fit its check")
    return data


def _length(header: bytes) -> int | None:
    if len(header) < _HEADER.size:
        return None
    length, check = _HEADER.unpack(header)
    return length if crc32c.masked(header[:8]) == check else None
