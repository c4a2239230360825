"""Labelled images in files, by number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import image_files
from tfgpipe_params.image.formats import Folders, TfRecords, decode_image
from tfgpipe_params.image.sources import BadRecordError

KEYS = {"image_key": "image/encoded", "label_key": "image/class/label"}


def _tfrecord(tmp_path: Path, *examples: bytes) -> TfRecords:
    image_files.write_tfrecord(tmp_path / "some.tfrecord", list(examples))
    return TfRecords(tmp_path / "some.tfrecord", **KEYS)


def test_an_encoded_image_is_what_was_encoded() -> None:
    image = decode_image(image_files.png(7))
    np.testing.assert_array_equal(image, np.float32(image_files.pixels(7)) / 255)


def test_what_is_no_image_is_a_bad_record() -> None:
    with pytest.raises(BadRecordError) as error:
        decode_image(b"not an image")
    assert str(error.value) == (
        "expected an image as PNG, JPEG, BMP or GIF; received 12 bytes that are none"
    )


def test_a_tfrecord_of_images(tmp_path: Path) -> None:
    source = _tfrecord(
        tmp_path, *(image_files.example(image_files.png(n), n) for n in range(3))
    )
    assert len(source) == 3
    assert source.name(2) == f"{tmp_path / 'some.tfrecord'} record 2"
    for number in (2, 0):
        image, label = source.read(number)
        assert label == number
        np.testing.assert_array_equal(
            image, np.float32(image_files.pixels(number)) / 255
        )


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"\xff" * 9, "it is no tf.train.Example"),
        (
            b"",
            "expected bytes 'image/encoded' and an integer 'image/class/label' in it; "
            "received nothing",
        ),
    ],
)
def test_a_tfrecord_of_something_else(
    tmp_path: Path, record: bytes, reason: str
) -> None:
    with pytest.raises(BadRecordError) as error:
        _tfrecord(tmp_path, record).read(0)
    assert str(error.value) == reason


def test_other_names_are_told(tmp_path: Path) -> None:
    image_files.write_tfrecord(tmp_path / "some", [image_files.example(b"", 1)])
    source = TfRecords(tmp_path / "some", image_key="png", label_key="label")
    with pytest.raises(BadRecordError, match="received image/class/label, image/enc"):
        source.read(0)


def test_folders_are_labels(tmp_path: Path) -> None:
    folder = Path(image_files.write_folders(tmp_path, 6))
    source = Folders(sorted(folder.glob("*/*")), labels=["a", "b"])
    assert source.read(2)[1] == 1
    np.testing.assert_array_equal(
        source.read(2)[0], np.float32(image_files.pixels(1)) / 255
    )
    with pytest.raises(BadRecordError) as error:
        source.read(4)
    assert str(error.value) == "expected a folder as of training, one of a, b"


def test_a_file_that_has_gone_is_a_bad_record(tmp_path: Path) -> None:
    source = Folders([tmp_path / "a" / "x.png"], labels=["a"])
    with pytest.raises(BadRecordError, match="it cannot be read: No such file"):
        source.read(0)
