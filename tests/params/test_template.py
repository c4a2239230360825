"""The file that users copy: all of its classes train, go on, and may be anywhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: (x[:, :2], y), r"inputs of shape \(3,\) each, .* \(2,\)"),
        (lambda x, y: ({"other": x}, y), "inputs in the structure of the network"),
        (
            lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(4),
            r"received \(None, 3\)\. .* leave out `batch`",
        ),
    ],
)
def test_inputs_that_the_network_does_not_take_are_refused(
    change: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    given = change(*template.Mine().examples("train"))
    monkeypatch.setattr(template.Mine, "examples", lambda self, split: given)
    argv = ["trainer", "--params=template.Mine", *SHORT, f"--logdir={tmp_path}"]
    assert main(argv) == 2
    assert re.search(words, capsys.readouterr().err)
