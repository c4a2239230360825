"""The files that a run on digits ends with, and what 8 bits cost."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import pytest

from benchmarks.studies import int8
from tests.helpers import experiments
from tfgpipe_params.image import digits
from tfgpipe_trainer.experiment import find
from tfgpipe_trainer.hyperparams import override
from tfgpipe_trainer.main import main


def test_a_run_ends_with_its_files_and_how_they_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"--set={name}={value}" for name, value in experiments.DIGITS.items()]
    argv = ["trainer", "--params=image.DigitsQat", f"--logdir={tmp_path}", *settings]
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


def test_without_quantization_ranges_come_from_training_images(tmp_path: Path) -> None:
    settings = [f"--set={name}={value}" for name, value in experiments.DIGITS.items()]
    settings += ["--set=precision.quantize=none"]
    argv = ["trainer", "--params=image.DigitsQat", f"--logdir={tmp_path}", *settings]
    assert main(argv) == 0
    assert (tmp_path / "export" / "model.tflite").exists()


def test_the_benchmark_compares_all_kinds_of_files(tmp_path: Path) -> None:
    settings = [f"{name}={value}" for name, value in experiments.DIGITS.items()]
    printed = int8.table(override(find("image.DigitsQat")(), settings), tmp_path)
    for name in ("float", "fake-quant", "int8", "int8, calibrated", "Keras' quantize"):
        assert re.search(rf"^ *{name} +\d+\.\d\d%", printed, re.MULTILINE), name
