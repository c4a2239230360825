"""TFRecord files are those that TensorFlow writes."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from tfgpipe_params.image import formats

RECORDS = [b"first", b"", bytes(range(256)) * 100, b"last"]


def test_records_are_those_tensorflow_reads(tmp_path: Path) -> None:
    path = tmp_path / "some.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in RECORDS:
            writer.write(record)
    ours = [formats.read_record(path, place) for place in formats.scan_records(path)]
    theirs = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
    assert ours == theirs == RECORDS
