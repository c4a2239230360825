"""Labelled images by number, in arrays and in TensorFlow Datasets."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from trainer.data import sources
from trainer.data.formats import Tfds
from trainer.data.sources import BadRecordError
from trainer.hyperparams import HyperparameterError

IMAGE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def test_images_of_every_type_are_from_0_to_1() -> None:
    for kind, full in [(np.uint8, 255), (np.uint16, 65535), (np.float64, 1)]:
        images = np.array([[[0, full]]], kind)
        image, label = sources.Arrays(images, np.array([3]), name="x").read(0)
        assert (image.dtype, image.shape, label) == (np.float32, (1, 2, 1), 3)
        assert image.ravel().tolist() == [0, 1]


def test_joined_sources_are_numbered_on() -> None:
    sizes = [2, 1, 3]
    parts = [
        sources.Arrays(np.full((n, 1, 1), i / 4), np.arange(n), name=f"file{i}")
        for i, n in enumerate(sizes)
    ]
    joined = sources.Joined(parts)
    names = [joined.name(number) for number in range(len(joined))]
    assert names == [
        f"file{i} record {n}" for i, size in enumerate(sizes) for n in range(size)
    ]
    found = [joined.read(number) for number in range(6)]
    assert [float(image[0, 0, 0]) for image, _ in found] == [0, 0, 0.25, 0.5, 0.5, 0.5]
    assert [label for _, label in found] == [0, 1, 0, 0, 1, 2]


def test_a_part_keeps_the_names_of_the_whole() -> None:
    whole = sources.Arrays(np.zeros((5, 1, 1)), np.arange(5), name="file")
    part = sources.Part(whole, np.array([1, 4]))
    assert len(part) == 2
    assert part.name(1) == "file record 4"
    assert part.read(1)[1] == 4


def test_tfds_is_asked_for_by_name_when_it_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(HyperparameterError) as error:
        Tfds("absent#train", image_key="image", label_key="label")
    assert str(error.value) == (
        "data.format: expected the package tensorflow_datasets for 'tfds'; received an "
        "environment without. `pip install tensorflow-datasets` brings it; tfrecord, "
        "npz and folders do without."
    )


def test_tfds_is_read_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def data_source(name: str, *, split: str) -> list[dict[str, object]]:
        if name != "small":
            raise ValueError(f"Dataset {name} not found.\nMore.")
        return [{"image": IMAGE, "label": len(split)}, {"label": 1}]

    fake = types.ModuleType("tensorflow_datasets")
    fake.data_source = data_source  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", fake)
    keys = {"image_key": "image", "label_key": "label"}
    for name, split in [("small", "train"), ("small#test", "test")]:
        image, label = Tfds(name, **keys).read(0)
        assert label == len(split)
        np.testing.assert_array_equal(image, np.float32(IMAGE) / 255)
    with pytest.raises(BadRecordError, match="expected 'image' in it; received label"):
        Tfds("small", **keys).read(1)
    with pytest.raises(HyperparameterError) as error:
        Tfds("large", **keys)
    assert str(error.value) == (
        "data.files: expected a data set of TensorFlow Datasets, such as "
        "'mnist#train'; received 'large': Dataset large not found."
    )
