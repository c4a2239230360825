"""Experiments on images: scikit-learn's digits, and a user's own files."""

from __future__ import annotations

import csv
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.helpers import image_files
from tfgpipe_params.image import digits
from tfgpipe_params.image.task import ImageClassifier
from tfgpipe_trainer.commands.runs import calibration_examples
from tfgpipe_trainer.config import Pipelining
from tfgpipe_trainer.experiment import find
from tfgpipe_trainer.hyperparams import HyperparameterError, override

SHORT = [
    "model.channels=(4, 8)",
    "model.strides=(2, 2)",
    "model.width=16",
    "training.num_steps=4",
    "training.batch_size=16",
]


def _short(*more: str) -> ImageClassifier:
    return override(find("image.Digits")(), [*SHORT, *more])


def test_an_epoch_has_each_digit_once() -> None:
    experiment = _short("augmentation.shift=0", "training.num_steps=68")
    batches = list(experiment.batches("train").as_numpy_iterator())
    rows = np.concatenate([pixels for pixels, _ in batches])[:1077]
    train = digits.read("train").pixels
    assert len(np.unique(rows.reshape(-1, 64), axis=0)) == len(rows)
    np.testing.assert_array_equal(
        np.sort(rows.reshape(-1, 64), axis=0), np.sort(train.reshape(-1, 64), axis=0)
    )


def test_a_batch_depends_on_the_seed_and_its_step_alone() -> None:
    whole = list(_short().batches("train").as_numpy_iterator())
    rest = list(_short().batches("train", first_step=2).as_numpy_iterator())
    assert len(whole) == 4
    for expected, received in zip(whole[2:], rest, strict=True):
        for a, b in zip(expected, received, strict=True):
            np.testing.assert_array_equal(a, b)
    other = next(_short("seed=1").batches("train").as_numpy_iterator())
    assert (whole[0][1] != other[1]).any()


def test_a_users_files_are_fitted_evaluated_and_told_apart(tmp_path: Path) -> None:
    experiment = _short(
        f"data.files={image_files.write_folders(tmp_path, 60)}",
        "data.shape=(4, 4, 3)",
    )
    model = experiment.build_model()
    model.fit(experiment.batches("train"), shuffle=False, verbose=0)
    scores = model.evaluate(
        experiment.batches("validation"), verbose=0, return_dict=True
    )
    text = experiment.decode(model, tmp_path)
    path = tmp_path / "predictions.csv"
    assert text == (f"accuracy {scores['accuracy']:.1%} of 6 validation images: {path}")
    rows = list(csv.DictReader(path.open()))
    assert [int(row["number"]) for row in rows] == list(range(6))
    # Every tenth image, in the order of the folders.
    assert [row["label"] for row in rows] == ["a", "a", "b", "b", "c", "c"]
    for row in rows:
        assert Path(row["file"]).parent == tmp_path / "folders" / row["label"]
        assert Path(row["file"]).is_file()
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert right == round(6 * scores["accuracy"])
    assert all(1 / 3 <= float(row["probability"]) <= 1 for row in rows)
    assert calibration_examples(experiment).shape[1:] == (4, 4, 3)


def test_a_users_images_need_no_scikit_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(part: str) -> None:
        raise HyperparameterError("params: expected scikit-learn")

    monkeypatch.setattr(digits, "read", absent)
    experiment = _short(f"data.files={image_files.write_npz(tmp_path, 30)}")
    assert experiment.network().output_shape == (None, 3)
    assert len(experiment.examples("train")) == 27


def test_what_is_wrong_with_files_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "x.tfrecord").touch()
    experiment = _short(f"data.files={tmp_path}/*")
    for split in ("train", "validation"):
        with pytest.raises(HyperparameterError, match=r"data\.files: expected TFRec"):
            experiment.batches(split)


def test_a_network_for_int8_first_trains_in_floats_and_then_rounds() -> None:
    precision = find("image.DigitsQat")().precision
    assert (precision.quantize, precision.quantize_start_step) == ("8bit", 100)
    assert precision.freeze_ranges_step is None


def test_a_network_of_ones_own_tells_as_many_classes_as_there_are(
    tmp_path: Path,
) -> None:
    experiment = override(
        find("variants.CustomImageModel")(),
        [
            f"data.files={image_files.write_folders(tmp_path, 12)}",
            "data.shape=(4, 4, 3)",
        ],
    )
    assert experiment.network().output_shape == (None, 3)


def test_a_limit_of_memory_is_in_gib() -> None:
    pipelining = Pipelining(num_stages=1, num_microbatches=1, memory_limit_gib=0.5)
    model = pipelining.build([keras.layers.Dense(2)])
    assert model.config.memory_limit == 2**29


def test_the_full_networks_are_built_for_a_users_images() -> None:
    small = override(
        find("image.AmoebaNetD")(),
        ["model.num_layers=3", "model.num_filters=16", "data.shape=(32, 32, 3)"],
    )
    assert small.network().output_shape == (None, 1000)
    resnet = override(find("image.ResNet50")(), ["data.shape=(32, 32, 1)"])
    network = resnet.network()
    assert network.output_shape == (None, 10)
    assert network.layers[-1].activation is keras.activations.linear


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "image.AmoebaNetD",
            "model.num_filters=24",
            "model: num_filters of AmoebaNet-D: expected a multiple of 16; received "
            "24.",
        ),
        (
            "image.ResNet50",
            "data.shape=(16, 32, 3)",
            "data.shape: expected a height and a width of at least 32, which ResNet-50 "
            "takes; received (16, 32, 3).",
        ),
    ],
)
def test_sizes_that_a_network_does_not_take(name: str, change: str, words: str) -> None:
    with pytest.raises(HyperparameterError) as error:
        override(find(name)(), [change]).build_model()
    assert str(error.value) == words
