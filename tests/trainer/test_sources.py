"""Labelled images by number, in arrays and in TensorFlow Datasets."""

from __future__ import annotations

import glob
import os
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpipe_params.image import sources
from tfgpipe_params.image.formats import Tfds
from tfgpipe_params.image.sources import BadRecordError
from tfgpipe_trainer import files
from tfgpipe_trainer.hyperparams import HyperparameterError

pytestmark = pytest.mark.pure

IMAGE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def test_images_of_every_type_are_from_0_to_1() -> None:
    for kind, full in [(np.uint8, 255), (np.uint16, 65535), (np.float64, 1)]:
        images = np.array([[[0, full]]], kind)
        image, label = sources.Arrays(images, np.array([3]), name="x").read(0)
        assert (image.dtype, image.shape, label) == (np.float32, (1, 2, 1), 3)
        assert image.ravel().tolist() == [0, 1]
        other_order = images.astype(images.dtype.newbyteorder())
        assert sources.from_0_to_1(other_order).ravel().tolist() == [0, 1]


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_wide_integers_are_those_of_a_byte(kind: type[np.integer]) -> None:
    pixels = np.array([0, 51, 255], kind)
    np.testing.assert_array_equal(
        sources.from_0_to_1(pixels), sources.from_0_to_1(pixels.astype(np.uint8))
    )
    # Nothing says whether these go up to 256, or 1023, or 65535.
    with pytest.raises(BadRecordError, match=r"from 0 to 255; received some from 0 to"):
        sources.from_0_to_1(np.array([0, 256], kind))


@pytest.mark.parametrize("wrong", [np.array([-1]), np.array([1j]), np.array(["a"])])
def test_what_are_no_pixels_is_refused(wrong: np.ndarray) -> None:
    with pytest.raises(BadRecordError, match="expected pixels"):
        sources.from_0_to_1(wrong)


def _matches(pattern: str) -> list[str]:
    paths = files.matching_files("data.files", pattern, example="*.txt")
    return [str(path) for path in paths]


def test_a_circle_of_links_is_followed_once(tmp_path: Path) -> None:
    inner = tmp_path / "top" / "x"
    inner.mkdir(parents=True)
    (inner / "a.txt").touch()
    (inner / "back").symlink_to("..")
    (inner / "above").symlink_to(tmp_path)
    (tmp_path / "b.txt").touch()
    assert _matches(f"{tmp_path}/top/**/*.txt") == [str(inner / "a.txt")]
    assert _matches(f"{tmp_path}/top/*/*.txt") == [str(inner / "a.txt")]
    # Through the link by name, and one folder under two names.
    assert _matches(f"{tmp_path}/top/x/*/x/**/a.txt") == [f"{inner}/back/x/a.txt"]


def test_links_to_other_folders_are_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "store" / "deep" / ".hidden").mkdir(parents=True)
    for name in ("store/a.txt", "store/deep/b.txt", "store/deep/.hidden/c.txt"):
        (tmp_path / name).touch()
    (tmp_path / "data" / "1").symlink_to(tmp_path / "store")
    (tmp_path / "data" / "2").symlink_to(tmp_path / "store" / "deep")
    (tmp_path / "data" / "same.txt").symlink_to(tmp_path / "store" / "a.txt")
    os.mkfifo(tmp_path / "data" / "pipe.txt")
    names = ["1/a.txt", "1/deep/b.txt", "same.txt"]
    found = [f"{tmp_path}/data/{name}" for name in names]
    assert _matches(f"{tmp_path}/data/**/*.txt") == found
    assert _matches(f"{tmp_path}/data/**") == found


@settings(max_examples=30, deadline=None)
@given(
    pattern=st.lists(st.sampled_from(["**", "*", "a", "b*"]), min_size=1, max_size=4)
)
def test_without_links_a_pattern_matches_what_glob_does(
    pattern: list[str], tree: Path
) -> None:
    text = "/".join([str(tree), *pattern])
    expected = set(filter(os.path.isfile, glob.glob(text, recursive=True)))
    if expected:
        assert _matches(text) == sorted(expected)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders in folders, with files in each."""
    top = tmp_path_factory.mktemp("tree")
    for name in ("b.txt", "a/b.txt", "a/b/a", "a/b/b.txt", "a/b1/b.txt", "b1/a/a"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).touch()
    return top


def test_the_limit_of_bad_records_is_that_of_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bad = sources.BadRecords(2)
    copies = [pickle.loads(pickle.dumps(bad)) for _ in range(2)]
    bad.add("a", "broken")
    copies[0].add("b", "broken")
    copies[1].add("a", "broken")  # It is known, if not to this process.
    with pytest.raises(
        HyperparameterError, match=r"at most 2 .* received 3.*\n  a: br"
    ):
        copies[1].add("c", "broken")
    files = list(tmp_path.iterdir())
    assert len(files) == 1
    del bad
    assert not files[0].exists()


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
    part = sources.Subset(whole, np.array([1, 4]))
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
