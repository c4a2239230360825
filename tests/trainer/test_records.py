"""Files of records, and mixtures, as the packages that write them have them."""

from __future__ import annotations

import concurrent.futures
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter

from tests.helpers import image_files, mixed, runs
from tfgpipe_params.image.images import ClassificationData
from tfgpipe_params.lm import text_files
from tfgpipe_params.lm.corpus import Corpus
from tfgpipe_trainer.batches import Mixture, as_examples, training_batches
from tfgpipe_trainer.hyperparams import HyperparameterError
from tfgpipe_trainer.main import main

TEXTS = [f"Text {i}.\n\nWith two paragraphs, and ü.\n" for i in range(20)]
TEXT_FORMATS = ["jsonl", "parquet", "arrow", "array_record"]


def write_texts(folder: Path, kind: str, texts: list[str]) -> Path:
    path = folder / f"texts.{kind}"
    if kind == "jsonl":
        lines = (json.dumps({"id": 1, "text": text}) for text in texts)
        path.write_text("\n".join([*lines, ""]))
    elif kind == "parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=3)
    elif kind == "arrow":
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "saved")
        (path,) = (folder / "saved").glob("*.arrow")
    else:
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for text in texts:
            writer.write(text.encode())
        writer.close()
    return path


@pytest.mark.parametrize("kind", TEXT_FORMATS)
def test_texts_are_those_that_were_written(kind: str, tmp_path: Path) -> None:
    corpus = Corpus(files=str(write_texts(tmp_path, kind, TEXTS)), documents="packed")
    expected = [text.encode() for text in TEXTS]
    assert corpus.read_documents("train") == expected[:18]
    assert corpus.read_documents("validation") == expected[18:]
    assert corpus.read("validation").tobytes() == b"\n".join(expected[18:])


def test_ten_files_are_split_by_files(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        write_texts(tmp_path / str(number), "jsonl", TEXTS[2 * number : 2 * number + 2])
    corpus = Corpus(files=f"{tmp_path}/*/*.jsonl")
    assert corpus.read_documents("validation") == [x.encode() for x in TEXTS[:2]]
    assert corpus.read_documents("train") == [x.encode() for x in TEXTS[2:]]


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        ('{"text": "a"}\n{"text"', "text", "line 2 of .*: "),
        ('{"body": "a"}', "text", "received 'text' for record 0 .* has body"),
        ('{"text": 3}', "text", "the key of a text in each record"),
        ('"a"\n[1]', "text", "for record 1 "),
    ],
)
def test_what_is_no_record_is_named(
    content: str, key: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(HyperparameterError, match=words):
        list(text_files.texts(path, key))


def test_other_files_beside_and_files_that_are_damaged_are_refused(
    tmp_path: Path,
) -> None:
    write_texts(tmp_path, "jsonl", TEXTS)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(HyperparameterError, match="received both for"):
        Corpus(files=f"{tmp_path}/*").read("train")
    for kind in ("parquet", "arrow", "array_record"):
        path = tmp_path / f"damaged.{kind}"
        path.write_bytes(b"damaged" * 100)
        with pytest.raises(HyperparameterError, match=r"^data\.files: expected"):
            list(text_files.texts(path, "text"))
    parquet = write_texts(tmp_path, "parquet", TEXTS)
    with pytest.raises(HyperparameterError, match="which has text; received 'body'"):
        list(text_files.texts(parquet, "body"))


def test_a_language_model_trains_on_records(tmp_path: Path) -> None:
    flags = runs.text_flags(tmp_path / "plain")
    lines = (tmp_path / "plain").read_text().splitlines(keepends=True)
    path = write_texts(tmp_path, "jsonl", lines)
    changed = [f"--set=data.files={path}", "--set=data.documents=packed"]
    assert main(["trainer", *flags, *changed, f"--logdir={tmp_path / 'run'}"]) == 0
    assert runs.losses(tmp_path / "run")


def write_images(folder: Path, kind: str, labels: list[int]) -> Path:
    images = [image_files.png(number) for number in range(len(labels))]
    path = folder / f"images.{kind}"
    rows: dict[str, Any] = {
        "image": [{"bytes": each, "path": None} for each in images],
        "label": labels,
    }
    if kind == "parquet":
        pq.write_table(pa.table(rows), path, row_group_size=4)
    elif kind == "arrow":
        datasets.Dataset.from_dict(rows).save_to_disk(folder / "saved")
        (path,) = (folder / "saved").glob("*.arrow")
    else:
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for image, label in zip(images, labels, strict=True):
            features = {
                "image/encoded": tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=[image])
                ),
                "image/class/label": tf.train.Feature(
                    int64_list=tf.train.Int64List(value=[label])
                ),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
        writer.close()
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow", "array_record"])
def test_images_are_those_that_were_written(kind: str, tmp_path: Path) -> None:
    labels = [i % 3 for i in range(20)]
    path = write_images(tmp_path, kind, labels)
    images = ClassificationData(files=str(path), classes=3, shape=(8, 8, 3))
    found = images.open("train")
    expected = tf.io.decode_png(image_files.png(5)).numpy() / np.float32(255)
    source = images.records("files", str(path))
    pixels, label = source.read(5)
    np.testing.assert_array_equal(pixels, expected)
    assert label == labels[5]
    assert source.name(5) == f"{path} record 5"
    assert (len(found), len(images.open("validation"))) == (18, 2)
    again = pickle.loads(pickle.dumps(source))  # As for a process that reads ahead.
    np.testing.assert_array_equal(again.read(19)[0], source.read(19)[0])


@pytest.mark.parametrize("kind", ["parquet", "arrow", "array_record"])
def test_threads_read_images_side_by_side(kind: str, tmp_path: Path) -> None:
    labels = [i % 5 for i in range(200)]
    path = write_images(tmp_path, kind, labels)
    source = ClassificationData(files=str(path), classes=5).records("files", str(path))
    numbers = np.random.default_rng(0).integers(0, 200, 2000).tolist()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [label for _, label in pool.map(source.read, numbers)]
    assert found == [labels[number] for number in numbers]


def test_columns_that_are_absent_are_named(tmp_path: Path) -> None:
    for kind in ("parquet", "arrow"):
        path = write_images(tmp_path, kind, [0, 1])
        images = ClassificationData(files=str(path), classes=2, image_key="picture")
        with pytest.raises(
            HyperparameterError, match=r"'picture'.*which has image, la"
        ):
            images.records("files", str(path))


def test_a_mixture_has_its_shares_in_any_stretch_and_epochs_of_its_own() -> None:
    web, code = np.arange(30), np.arange(100, 110)
    mixture = Mixture([(web, web), (code, code)], weights=[3, 1])

    def drawn(first: int, last: int) -> list[int]:
        batches = training_batches(
            mixture, batch_size=8, steps=range(first, last), seed=3
        )
        return [x for batch, _ in batches.as_numpy_iterator() for x in batch.tolist()]

    found = drawn(0, 10)
    assert found == [*drawn(0, 4), *drawn(4, 10)]
    assert [sum(x >= 100 for x in found[i : i + 8]) for i in range(0, 80, 8)] == [
        2
    ] * 10
    assert sorted(x for x in found if x < 100)[::2] == web.tolist()  # Two epochs.
    assert sorted(x for x in found if x >= 100)[::2] == code.tolist()
    inputs, targets = mixture.take(np.array([35, 2, 39, 0]))
    assert inputs.tolist() == targets.tolist() == [105, 2, 109, 0]


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, 1, 1]])
def test_a_mixture_needs_a_positive_weight_for_each(weights: list[float]) -> None:
    with pytest.raises(HyperparameterError, match="a positive weight for each source"):
        Mixture([np.ones([3, 1]), np.ones([3, 1])], weights)


def test_a_run_on_a_mixture_goes_on_exactly(tmp_path: Path) -> None:
    flags = [
        *(f"--params={mixed.__name__}.Mixed", "--set=training.log_every=1"),
        *("--set=checkpoint.every_steps=2", "--set=width=8"),
    ]
    steps = "--set=training.num_steps"
    constant = "--set=optimizer.schedule=constant"
    flags += [constant, "--set=optimizer.warmup=0"]
    assert main(["trainer", *flags, f"{steps}=8", f"--logdir={tmp_path / 'a'}"]) == 0
    for number in (4, 8):
        more = [f"{steps}={number}", "--allow_changes", f"--logdir={tmp_path / 'b'}"]
        assert main(["trainer", *flags, *more]) == 0
    assert runs.losses(tmp_path / "a") == runs.losses(tmp_path / "b")
    assert len(as_examples(mixed.Mixed().examples("validation"))) == 10_000
