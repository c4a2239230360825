"""The files that a run on digits ends with, and what 8 bits cost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import keras
import pytest

from tests.helpers import experiments
from trainer.data import digits
from trainer.main import main


def test_a_run_ends_with_its_files_and_what_they_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"--set={name}={value}" for name, value in experiments.DIGITS.items()]
    argv = ["trainer", "--params=image.DigitsQat", f"--logdir={tmp_path}", *settings]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    names = ["float", "fake-quant", "int8", "int8, calibrated", "Keras' quantize"]
    for name in names:
        assert re.search(rf"^{name} +\d+\.\d\d%", printed, re.MULTILINE), name
    assert "largest difference" in printed
    assert {path.name for path in (tmp_path / "export").iterdir()} == {
        "model.keras",
        "saved_model",
        "float.tflite",
        "model.tflite",
        "calibrated.tflite",
        "keras-int8.keras",
        "table.txt",
    }
    table = (tmp_path / "export" / "table.txt").read_text()
    assert table.strip() in printed
    twin = (tmp_path / "float" / "params.txt").read_text()
    assert "precision.quantize = 'none'" in twin
    records = (tmp_path / "float" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["step"] == 4

    loaded = keras.models.load_model(tmp_path / "export" / "model.keras")
    assert loaded(digits.read("test").pixels[:3]).shape == (3, 10)

    # Exporting alone finds the other run complete, and says the same.
    assert main([*argv, "--mode=export"]) == 0
    again = capsys.readouterr().out
    assert "Tracing" not in again
    # Sizes may differ by names, of which layers get new ones in the same process.
    assert re.findall(r"\d\.\d\d%", again) == re.findall(r"\d\.\d\d%", table)


def test_without_quantization_ranges_come_from_training_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"--set={name}={value}" for name, value in experiments.DIGITS.items()]
    settings += ["--set=precision.quantize=none"]
    argv = ["trainer", "--params=image.DigitsQat", f"--logdir={tmp_path}", *settings]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "fake-quant" not in printed
    assert "int8, calibrated" in printed
    assert not (tmp_path / "float").exists()
