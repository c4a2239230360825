"""Whole runs of the trainer on language models in 8 bits, and the files of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import runs
from tfgpipe_trainer.main import main
from tfgpipe_trainer.progress import Measurement, Progress

pytestmark = pytest.mark.nightly


def test_a_stopped_run_in_8_bits_goes_on_with_the_same_losses(
    small_lm: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Ranges, and the scale of the loss, have to be in a checkpoint as well.
    small_lm += [
        "--set=precision.policy=mixed_float16",
        "--set=precision.quantize=8bit",
    ]
    small_lm += ["--set=precision.quantize_start_step=2"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*small_lm, f"--logdir={whole}"]) == 0
    show = Progress.show

    def show_and_stop(self: Progress, measurement: Measurement) -> None:
        show(self, measurement)
        if measurement.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    monkeypatch.setattr(Progress, "show", show_and_stop)
    assert main([*small_lm, f"--logdir={stopped}"]) == 42
    monkeypatch.setattr(Progress, "show", show)
    capsys.readouterr()
    assert main([*small_lm, f"--logdir={stopped}"]) == 0
    assert "Going on from step 5." in capsys.readouterr().out
    assert runs.losses(stopped) == runs.losses(whole)
    assert runs.records(stopped)[-1] == runs.records(whole)[-1]


def test_exporting_a_language_model_says_what_runs_where(
    small_lm: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_lm += ["--set=training.num_steps=2"]
    plain, quantized = (f"--logdir={tmp_path / name}" for name in ("plain", "8bit"))
    assert main([*small_lm, plain]) == 0
    assert main([*small_lm, plain, "--mode=export"]) == 0
    assert "No int8 file: the model is not quantized." in capsys.readouterr().out
    files = {path.name for path in (tmp_path / "plain" / "export").iterdir()}
    assert files == {"model.keras", "model.safetensors", "saved_model"}
    small_lm += ["--set=precision.quantize=8bit"]
    assert main([*small_lm, quantized]) == 0
    assert main([*small_lm, quantized, "--mode=export"]) == 0
    assert "int8 file" in capsys.readouterr().out
