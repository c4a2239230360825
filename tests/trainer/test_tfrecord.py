"""TFRecord files and their checksums are those that TensorFlow writes."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import tensorflow as tf

from trainer.data import crc32c, formats

RECORDS = [b"first", b"", b"third" * 100, b"last"]


def test_records_are_those_tensorflow_reads(tmp_path: Path) -> None:
    path = tmp_path / "some.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in RECORDS:
            writer.write(record)
    ours = [formats.read_record(path, place) for place in formats.scan_records(path)]
    theirs = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
    assert ours == theirs == RECORDS


def test_checksums_of_any_length_are_those_tensorflow_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "lengths.tfrecord"
    lengths = [*range(140), 255, 256, 257, 1000, 4096, 5001]
    written = [rng.bytes(length) for length in lengths]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for data in written:
            writer.write(data)
    raw, start = path.read_bytes(), 0
    for data in written:
        length, check = struct.unpack_from("<QI", raw, start)
        assert length == len(data)
        assert crc32c.masked(raw[start : start + 8]) == check
        (check,) = struct.unpack_from("<I", raw, start + 12 + length)
        assert crc32c.masked(data) == check, length
        start += 16 + length
