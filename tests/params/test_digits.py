"""Digits: real images, a network that is trained for 8 bits, and its files."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import numpy as np
import pytest

from benchmarks.studies import int8
from tests.helpers import experiments
from tfgpipe_params.image import digits
from tfgpipe_params.image.classifiers import ConvNetClassifier
from tfgpipe_trainer.config import Precision
from tfgpipe_trainer.experiment import find
from tfgpipe_trainer.hyperparams import HyperparameterError, override
from tfgpipe_trainer.main import main


def _short(**more: str) -> ConvNetClassifier:
    values = {**experiments.DIGITS, **more}
    return override(find("image.DigitsQat")(), [f"{n}={v}" for n, v in values.items()])


def test_the_parts_are_apart_and_make_up_the_whole() -> None:
    parts = [digits.read(part) for part in ("train", "validation", "test")]
    assert [len(part.labels) for part in parts] == [1077, 240, 480]
    rows = np.concatenate([part.pixels.reshape(-1, 64) for part in parts])
    assert (rows.min(), rows.max()) == (0, 1)
    assert len(np.unique(rows, axis=0)) == len(rows) == 1797
    for part in parts:
        assert set(part.labels) == set(range(10))


def test_a_batch_depends_on_the_seed_and_its_step_alone() -> None:
    whole = list(_short().batches("train").as_numpy_iterator())
    rest = list(_short().batches("train", first_step=2).as_numpy_iterator())
    assert len(whole) == 4
    for (x, y), (u, v) in zip(whole[2:], rest, strict=True):
        np.testing.assert_array_equal(x, u)
        np.testing.assert_array_equal(y, v)
    other = next(_short(seed="1").batches("train").as_numpy_iterator())
    assert (whole[0][1] != other[1]).any()


def test_images_are_moved_and_no_pixel_is_made_up() -> None:
    x, _ = next(_short().batches("train").as_numpy_iterator())
    still, labels = next(
        _short(**{"augmentation.shift": "0"}).batches("train").as_numpy_iterator()
    )
    assert x.shape == still.shape == (16, 8, 8, 1)
    train = digits.read("train")
    for image, label in zip(still, labels, strict=True):
        same = (train.pixels == image).all(axis=(1, 2, 3))
        assert train.labels[same] == [label]
    assert x.sum() <= still.sum()


def test_a_precision_leaves_the_policy_as_it_was() -> None:
    model = _short(**{"precision.policy": "mixed_float16"}).build_model()
    assert keras.config.dtype_policy().name == "float32"
    assert {stage.layers[-1].compute_dtype for stage in model.stages} == {"float16"}
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"


def test_ranges_are_seen_before_they_are_frozen() -> None:
    with pytest.raises(HyperparameterError) as error:
        Precision(quantize_start_step=10, freeze_ranges_step=5)
    assert str(error.value) == (
        "freeze_ranges_step: expected at least quantize_start_step=10, or None; "
        "received 5."
    )


def _command(folder: Path) -> list[str]:
    settings = [f"--set={name}={value}" for name, value in experiments.DIGITS.items()]
    return ["trainer", "--params=image.DigitsQat", f"--logdir={folder}", *settings]


@pytest.mark.nightly
def test_a_run_ends_with_its_files_and_how_they_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = _command(tmp_path)
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "largest difference" in printed
    export = tmp_path / "export"
    assert {path.name for path in export.iterdir()} == {
        "model.keras",
        "model.safetensors",
        "saved_model",
        "model.tflite",
        "int8.txt",
    }
    assert (export / "int8.txt").read_text().strip() in printed
    loaded = keras.models.load_model(export / "model.keras")
    assert loaded(digits.read("test").pixels[:3]).shape == (3, 10)

    assert main([*argv, "--mode=export"]) == 0
    assert "Tracing" not in capsys.readouterr().out


@pytest.mark.nightly
def test_without_quantization_ranges_come_from_training_images(tmp_path: Path) -> None:
    assert main([*_command(tmp_path), "--set=precision.quantize=none"]) == 0
    assert (tmp_path / "export" / "model.tflite").exists()


@pytest.mark.nightly
def test_the_benchmark_compares_all_kinds_of_files(tmp_path: Path) -> None:
    printed = int8.table(_short(), tmp_path)
    for name in ("float", "fake-quant", "int8", "int8, calibrated", "Keras' quantize"):
        assert re.search(rf"^ *{name} +\d+\.\d\d%", printed, re.MULTILINE), name
