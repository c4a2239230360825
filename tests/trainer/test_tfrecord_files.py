"""TFRecord files by record number, and broken ones.

`tests/trainer/test_tfrecord.py` reads files that TensorFlow has written.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from tfgpipe_params.image import formats
from tfgpipe_params.image.sources import BadRecordError
from tfgpipe_trainer.hyperparams import HyperparameterError

pytestmark = pytest.mark.pure

RECORDS = [b"first", b"", b"third" * 100, b"last"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.tfrecord"
    path.write_bytes(b"".join(map(_framed, RECORDS)))
    return path


def _framed(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    checks = [
        struct.pack("<I", formats.masked_crc32c(part)) for part in (length, record)
    ]
    return length + checks[0] + record + checks[1]


def _read_all(path: Path) -> list[bytes | str]:
    found: list[bytes | str] = []
    for place in formats.scan_records(path):
        try:
            found.append(formats.read_record(path, place))
        except BadRecordError as error:
            found.append(str(error))
    return found


def _change(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_records_are_read_as_they_were_written(path: Path) -> None:
    assert _read_all(path) == RECORDS


def test_a_record_is_framed_as_tensorflow_does(tmp_path: Path) -> None:
    path = tmp_path / "some.tfrecord"
    # What `tf.io.TFRecordWriter` has written.
    path.write_bytes(bytes.fromhex("0500000000000000eab2043e666972737455ff23e5"))
    assert _read_all(path) == [b"first"]


def test_google_crc32c_is_asked_for_by_name_when_it_is_absent(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(HyperparameterError, match="`pip install google-crc32c` brings"):
        formats.scan_records(path)


def test_one_changed_byte_costs_one_record(path: Path) -> None:
    _change(path, at=14)
    reason = "its data does not fit its check"
    assert _read_all(path) == [reason, *RECORDS[1:]]


@pytest.mark.parametrize("missing", [1, 4, 7])
def test_a_file_that_ends_early_costs_its_last_record(path: Path, missing: int) -> None:
    path.write_bytes(path.read_bytes()[:-missing])
    reason = "the file ends in the middle of it"
    assert _read_all(path) == [*RECORDS[:3], reason]


def test_a_changed_length_costs_what_follows(path: Path) -> None:
    _change(path, at=16 + len(RECORDS[0]))
    reason = "its length does not fit its check; what follows it is not read"
    assert _read_all(path) == [RECORDS[0], reason]


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    with pytest.raises(HyperparameterError) as error:
        formats.scan_records(path)
    assert str(error.value) == (
        "data.files: expected TFRecord files, not compressed; received "
        f"{path}, which is empty. Other kinds of files are named by data.format."
    )


@pytest.mark.parametrize("content", [b"short", b"some other kind of file" * 10])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(HyperparameterError, match=r"which does not begin as one does"):
        formats.scan_records(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HyperparameterError) as error:
        formats.scan_records(tmp_path)  # A folder, since nothing is forbidden to root.
    assert str(error.value) == (
        f"data.files: expected files that can be read; received {tmp_path}: Is a "
        "directory."
    )
