"""Batches of a user's images: a step's are its own, bad records are replaced."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import image_files
from tfgpipe_params.image import image_examples
from tfgpipe_params.image.digits import DigitImages
from tfgpipe_params.image.image_examples import Class
from tfgpipe_params.image.images import Augmentation, ClassificationData
from tfgpipe_params.image.sources import (
    BadRecordError,
    BadRecords,
    Source,
)
from tfgpipe_params.parallelism import SingleDevice as Classifier
from tfgpipe_trainer.batches import record_error, training_batches
from tfgpipe_trainer.hyperparams import HyperparameterError

SHAPE = (4, 5, 3)


class Numbers(Source):
    """Images that are all their number, some of them bad."""

    def __init__(self, count: int, bad: set[int] | None = None) -> None:
        self._count = count
        self._bad = bad or set()
        self.num_reads = 0

    def __len__(self) -> int:
        return self._count

    def name(self, number: int) -> str:
        return f"record {number}"

    def read(self, number: int) -> tuple[np.ndarray, int]:
        self.num_reads += 1
        if number in self._bad:
            raise BadRecordError("it is bad")
        return np.full((2, 2, 1), number, np.float32), number


def _examples(
    source: Source, limit: int = 100, cache: bool = False
) -> image_examples.ImageExamples:
    return image_examples.ImageExamples(
        source,
        shape=(2, 2, 1),
        target=Class(100),
        bad=BadRecords(limit),
        cache=cache,
    )


def _classes(
    examples: image_examples.ImageExamples, steps: range, batch_size: int = 4
) -> list[list[int]]:
    dataset = training_batches(examples, batch_size=batch_size, steps=steps, seed=1)
    return [classes.tolist() for _, classes in dataset.as_numpy_iterator()]


@settings(max_examples=10, deadline=None)
@given(first=st.integers(0, 7), bad=st.sets(st.integers(0, 9), max_size=6))
def test_a_run_that_is_taken_up_has_the_batches_it_would_have_had(first, bad):
    whole = _classes(_examples(Numbers(10, bad)), range(8))
    assert _classes(_examples(Numbers(10, bad)), range(first, 8)) == whole[first:]


def test_rows_are_changed_alike_whichever_host_reads_them() -> None:
    images = np.arange(8 * 36, dtype=np.float32).reshape(8, 6, 6, 1)
    augmentation = Augmentation(shift=2, flip="horizontal")

    def changed(rows: slice, step: int = 3) -> np.ndarray:
        return augmentation.apply(
            images[rows], rows=rows, batch_size=8, seed=5, step=step
        )

    whole = changed(slice(0, 8))
    parts = [changed(slice(0, 4)), changed(slice(4, 8))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert (changed(slice(0, 8), step=4) != whole).any()
    # Nothing is made up: each pixel was in its image, or is zero.
    for before, after in zip(images, whole, strict=True):
        assert set(after.ravel()) <= set(before.ravel()) | {0.0}


def test_a_bad_record_is_replaced_by_the_next_good_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = {2, 3, 9}
    instead = {2: 4, 3: 4, 9: 0}
    good = _classes(_examples(Numbers(10)), range(5))
    examples = _examples(Numbers(10, bad))
    expected = [[instead.get(number, number) for number in batch] for batch in good]
    assert _classes(examples, range(5)) == expected
    # Each is counted, and named, once.
    assert len(examples.bad) == 3
    assert sorted(examples.bad.first) == [f"record {n}: it is bad" for n in (2, 3, 9)]
    named = capsys.readouterr().err.splitlines()
    assert sorted(line for line in named if "Bad" in line) == [
        f"Bad record, not used: record {n}: it is bad." for n in (2, 3, 9)
    ]


def test_the_first_ten_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    bad = BadRecords(limit=100)
    for number in range(15):
        bad.add(f"record {number}", "it is bad")
    assert (len(bad), len(bad.first)) == (15, 10)
    assert capsys.readouterr().err.count("Bad record") == 10


def test_more_than_the_limit_are_an_error() -> None:
    bad = BadRecords(limit=2)
    for number in (1, 1, 2, 2):
        bad.add(f"record {number}", "it is bad")
    with pytest.raises(HyperparameterError) as error:
        bad.add("record 3", "it is bad, too")
    assert str(error.value) == (
        "data.max_bad_records: expected at most 2 bad records; received 3, of which "
        "the first are\n  record 1: it is bad\n  record 2: it is bad\n"
        "  record 3: it is bad, too\n"
        "Mend or remove them, or raise data.max_bad_records."
    )


def test_training_ends_at_the_limit_with_the_same_words() -> None:
    examples = _examples(Numbers(10, {2, 3, 9}), limit=1)
    with pytest.raises(tf.errors.OpError) as error:
        _classes(examples, range(5))
    named = record_error(error.value)
    assert isinstance(named, HyperparameterError)
    # Images are decoded in parallel: the third may be there when the second is one too
    # many.
    words = (
        r"data\.max_bad_records: expected at most 1 bad records; received [23], of "
        r"which the first are\n  record "
    )
    assert re.match(words, str(named))
    assert str(named).endswith("Mend or remove them, or raise data.max_bad_records.")
    assert record_error(ValueError("something else")) is None


def test_a_source_without_a_good_record_is_an_error() -> None:
    with pytest.raises(HyperparameterError) as error:
        _examples(Numbers(2, {0, 1})).read(0)
    assert str(error.value) == (
        "data.files: expected records that can be used; received 2 of which none "
        "can.\n  record 0: it is bad\n  record 1: it is bad\n"
    )


@pytest.mark.parametrize(("cache", "reads"), [(False, 20), (True, 10)])
def test_a_cache_reads_each_record_once(cache: bool, reads: int) -> None:
    source = Numbers(10)
    examples = _examples(source, cache=cache)
    for _ in range(2):
        assert [examples.read(number)[1] for number in range(10)] == list(range(10))
    assert source.num_reads == reads


@pytest.mark.parametrize(
    "write",
    [image_files.write_tfrecords, image_files.write_npz, image_files.write_folders],
)
def test_every_kind_of_file_holds_the_same_images(write, tmp_path: Path) -> None:
    data = ClassificationData(files=write(tmp_path, 30), shape=SHAPE, classes=3)
    parts = {split: data.open(split) for split in ("train", "validation")}
    assert {split: len(part) for split, part in parts.items()} == {
        "train": 27,
        "validation": 3,
    }
    # As a process gets them that reads examples ahead.
    parts = pickle.loads(pickle.dumps(parts))
    found = {
        image.tobytes(): label
        for part in parts.values()
        for image, label in map(part.read, range(len(part)))
    }
    assert found == {
        (np.float32(image_files.pixels(number)) / 255).tobytes(): number % 3
        for number in range(30)
    }


def test_other_files_are_for_validation(tmp_path: Path) -> None:
    for name, count in [("a", 4), ("b", 2)]:
        (tmp_path / name).mkdir()
        image_files.write_npz(tmp_path / name, count)
    data = ClassificationData(
        files=str(tmp_path / "a" / "*"),
        validation_files=str(tmp_path / "b" / "*"),
        classes=3,
    )
    assert (len(data.open("train")), len(data.open("validation"))) == (4, 2)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_brought_to_the_shape(tmp_path: Path, channels: int) -> None:
    data = ClassificationData(
        files=image_files.write_npz(tmp_path, 10), shape=(6, 7, channels), classes=3
    )
    image, _ = data.open("train").read(0)
    assert (image.shape, image.dtype) == ((6, 7, channels), np.float32)
    assert abs(image.mean() - image_files.pixels(0).mean() / 255) < 0.1


def test_a_broken_image_in_a_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = [image_files.example(image_files.png(n), n % 3) for n in range(10)]
    examples[2] = image_files.example(b"broken", 0)
    image_files.write_tfrecord(tmp_path / "x", examples)
    data = ClassificationData(files=str(tmp_path / "x"), shape=SHAPE, classes=3).open(
        "train"
    )
    assert data.read(2)[1] == 3 % 3
    assert capsys.readouterr().err == (
        f"Bad record, not used: {tmp_path / 'x'} record 2: expected an "
        "image as PNG, JPEG, BMP or GIF; received 6 bytes that are none.\n"
    )


def _error(**values: object) -> str:
    with pytest.raises(HyperparameterError) as error:
        ClassificationData(**values).open("train")  # type: ignore[arg-type]
    return str(error.value)


def test_no_file_is_an_error(tmp_path: Path) -> None:
    assert _error(files=f"{tmp_path}/*.png") == (
        "data.files: expected a glob that matches files, such as 'images/*/*.png'; "
        f"received '{tmp_path}/*.png', which matches none."
    )


def test_too_few_to_hold_some_out_is_an_error(tmp_path: Path) -> None:
    data = ClassificationData(files=image_files.write_npz(tmp_path, 9), classes=3)
    with pytest.raises(HyperparameterError) as error:
        data.open("validation")
    assert str(error.value) == (
        "data.files: expected at least 10 images, every tenth for validation; received "
        "9. Or name others as data.validation_files."
    )


@pytest.mark.parametrize("content", [b"", b"no array"])
def test_another_kind_of_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    assert _error(files=str(path)).startswith(
        f"data.files: expected .npz files; received {path}: "
    )


def test_arrays_of_other_names_are_an_error(tmp_path: Path) -> None:
    files = image_files.write_npz(tmp_path, 3)
    assert _error(files=files, image_key="images") == (
        f"data.files: expected arrays 'images' and 'y'; received {files}, which has x, "
        "y. Others are named by data.image_key and data.label_key."
    )


def test_arrays_of_other_shapes_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.zeros((3, 4)), y=np.zeros(3))
    assert _error(files=str(path)) == (
        "data.files: expected images as [N, height, width] or [N, height, width, "
        f"channels], and N labels; received [3, 4] and [3] in {path}."
    )


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 1.0, 0.5, 2.5], "received 0.5 as 'y' of record 2 in {}, the first of 2."),
        ([0, 1, 2, np.nan], "received nan as 'y' of record 3 in {}, the first of 1."),
        (["a", "b", "c", "d"], "received 'y' of type <U1 in {}."),
    ],
)
def test_labels_that_are_no_integers_are_an_error(
    labels: list[object], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.zeros((4, 2, 2)), y=labels)
    expected = "data.files: expected integers as labels; " + words.format(path)
    assert _error(files=str(path), classes=3) == expected


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.full((4, 2, 2), 300)}, "data.files: expected pixels of type int64 f"),
        ({"x": np.full((4, 2, 2), 1j)}, "data.files: expected pixels as numbers; rec"),
        ({"y": np.full(4, 2**63, "u8")}, "data.files: expected labels below 2**63; r"),
        ({"y": np.full(4, 10**12)}, "data.classes: expected the number of classes, a"),
    ],
)
def test_arrays_of_other_values_are_an_error(
    arrays: dict[str, np.ndarray], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, **{"x": np.zeros((4, 2, 2)), "y": np.zeros(4), **arrays})
    assert _error(files=str(path)).startswith(words)


def test_one_array_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "x.npz").open("wb") as file:
        np.save(file, np.zeros((4, 2, 2)))
    assert "it is one array of numpy.save" in _error(files=str(tmp_path / "x.npz"))


def test_more_classes_than_memory_is_for_are_refused() -> None:
    with pytest.raises(HyperparameterError, match=r"^classes: expected an int or None"):
        ClassificationData(classes=10**9)


def test_both_splits_count_bad_records_together(tmp_path: Path) -> None:
    examples = [image_files.example(b"broken", 0) for _ in range(20)]
    examples[0] = examples[9] = image_files.example(image_files.png(0), 0)
    image_files.write_tfrecord(tmp_path / "x", examples)
    data = ClassificationData(files=str(tmp_path / "x"), classes=3, max_bad_records=2)
    train, validation = data.open("train"), data.open("validation")
    validation.read(1)
    train.bad.add("another", "broken")
    with pytest.raises(HyperparameterError, match=r"^data\.max_bad_records: .* 3"):
        validation.bad.add("one more", "broken")


def test_whole_numbers_of_any_type_are_labels(tmp_path: Path) -> None:
    for kind in ("uint8", "float32", "bool"):
        path = tmp_path / f"{kind}.npz"
        np.savez(path, x=np.zeros((10, 2, 2)), y=np.arange(10).astype(kind))
        target = (
            ClassificationData(files=str(path), classes=10).open("train").read(7)[1]
        )
        assert (target, target.dtype) == (1 if kind == "bool" else 7, np.int32)


@pytest.mark.parametrize(
    ("write", "first_label"),
    [(image_files.write_npz, 0), (image_files.write_folders, 1)],
)
def test_files_say_how_many_classes_there_are(
    write, first_label: int, tmp_path: Path
) -> None:
    data = ClassificationData(
        files=write(tmp_path, 30), shape=SHAPE, first_label=first_label
    )
    assert data.num_classes == 3
    assert {int(data.open("train").read(i)[1]) for i in range(27)} == {0, 1, 2}


def test_another_number_of_classes_than_folders_is_an_error(tmp_path: Path) -> None:
    files = image_files.write_folders(tmp_path, 30)
    assert _error(files=files, classes=10) == (
        f"data.classes: expected 3, the number of folders in {files} (a, b, c); "
        "received 10. Leave it out."
    )


def test_one_folder_is_an_error(tmp_path: Path) -> None:
    files = image_files.write_folders(tmp_path, 1)
    assert _error(files=files).startswith(
        "data.files: expected images in at least 2 folders, one for each class; "
    )


def test_classes_of_files_that_do_not_say_them_are_asked_for(tmp_path: Path) -> None:
    files = image_files.write_tfrecords(tmp_path, 30)
    assert _error(files=files).startswith("data.classes: expected the number of cl")


def test_a_name_is_of_the_record_that_was_read() -> None:
    examples = _examples(Numbers(5, bad={2}))
    for number in range(5):
        examples.read(number)
    assert [examples.name(i)[-1] for i in range(5)] == ["0", "1", "3", "3", "4"]


def test_labels_outside_the_classes_are_an_error(tmp_path: Path) -> None:
    files = image_files.write_npz(tmp_path, 30)
    words = _error(files=files, shape=SHAPE, classes=2, first_label=7)
    assert words.startswith("data.max_bad_records: expected at most 10 bad records;")
    assert (
        "record 0: expected a label from 7 to 8, as data.first_label and data.classes "
        "say; received 0" in words
    )


def test_a_shape_without_colors_is_an_error() -> None:
    with pytest.raises(HyperparameterError) as error:
        ClassificationData(shape=(8, 8, 2))
    assert str(error.value) == (
        "shape: expected height and width of at least 1, and 1 or 3 channels; received "
        "(8, 8, 2)."
    )


def test_predictions_are_of_folders_of_any_name(tmp_path: Path) -> None:
    for label in ("a", os.fsdecode(b"\xff")):
        (tmp_path / "files" / label).mkdir(parents=True)
        for number in range(10):
            path = tmp_path / "files" / label / f"{number}.png"
            path.write_bytes(image_files.png(number))
    task = Classifier(data=DigitImages(files=str(tmp_path / "files")))
    model = mock.Mock()
    model.predict = lambda pixels, verbose: np.eye(2)[[1] * len(pixels)]
    task.decode(model, tmp_path)
    written = (tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[2] for line in written] == ["label", "a", r"\udcff"]
