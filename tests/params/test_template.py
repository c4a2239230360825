"""The file that users copy: all of its classes train, go on, and may be anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from params import template
from tests.trainer import runs
from trainer.checkpoint import store
from trainer.experiment import Experiment, find
from trainer.hyperparams import HyperparameterError
from trainer.main import main

SHORT = [
    "--set=training.num_steps=6",
    "--set=training.log_every=1",
    "--set=width=8",
    "--set=saving.checkpoint_steps=2",
]


@pytest.mark.parametrize("name", ["Mine", "FromDataset", "FromItems", "OwnClass"])
def test_it_trains_and_goes_on_exactly(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["trainer", f"--params=template.{name}", *SHORT]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*command, f"--logdir={whole}"]) == 0
    assert "accuracy" in capsys.readouterr().out
    if name == "OwnClass":  # Its data are those of `Mine`.
        return
    shutil.copytree(whole, stopped)
    for step in store.steps(stopped / "checkpoints")[1:]:
        store.remove(store.place(stopped / "checkpoints", step))
    assert main([*command, f"--logdir={stopped}"]) == 0
    printed = capsys.readouterr().out
    assert "Going on from step 2." in printed
    assert ("Skipping 2 batches of a tf.data.Dataset" in printed) == (
        name == "FromDataset"
    )
    assert runs.timeless(stopped) == runs.timeless(whole)


def test_a_class_is_found_in_any_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    shutil.copy(template.__file__, package / "my_file.py")
    monkeypatch.syspath_prepend(tmp_path)
    found = find("my_package.my_file.OwnClass")
    assert issubclass(found, Experiment)
    assert found.__module__ == "my_package.my_file"
    with pytest.raises(HyperparameterError, match=r"Did you mean my_package.my_file.M"):
        find("my_package.my_file.Mein")


def test_an_experiment_without_data_says_what_is_missing() -> None:
    class Empty(template.Mine):
        examples = Experiment.examples

    with pytest.raises(HyperparameterError, match=r"Empty: .* `examples\(split\)`"):
        Empty().batches("train")
