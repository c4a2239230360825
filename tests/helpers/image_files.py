"""Small labelled images in files of every kind, as a user may have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

SHAPE = (4, 5, 3)


def pixels(number: int) -> np.ndarray:
    """Returns an image that no other number has, `[4, 5, 3]` of type uint8."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, SHAPE, dtype=np.uint8)


def example(image: bytes, label: int) -> bytes:
    """Returns a `tf.train.Example` with the names that ImageNet's files have."""
    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "image/class/label": tf.train.Feature(
            int64_list=tf.train.Int64List(value=[label])
        ),
    }
    return tf.train.Example(
        features=tf.train.Features(feature=features)
    ).SerializeToString()


def png(number: int) -> bytes:
    return tf.io.encode_png(pixels(number)).numpy()


def write_tfrecord(path: Path, records: list[bytes]) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def write_tfrecords(folder: Path, num_images: int, *, num_files: int = 2) -> str:
    """Writes images whose label is their number modulo 3, and returns a glob."""
    for number, part in enumerate(np.array_split(np.arange(num_images), num_files)):
        write_tfrecord(
            folder / f"train-{number:05}-of-{num_files:05}",
            [example(png(image), image % 3) for image in part.tolist()],
        )
    return str(folder / "train-*")


def write_npz(folder: Path, num_images: int) -> str:
    images = np.stack([pixels(number) for number in range(num_images)])
    np.savez(folder / "images.npz", x=images, y=np.arange(num_images) % 3)
    return str(folder / "images.npz")


def write_folders(folder: Path, num_images: int) -> str:
    for number in range(num_images):
        path = folder / "folders" / "abc"[number % 3] / f"{number // 3:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return str(folder / "folders")
