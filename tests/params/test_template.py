"""The file that users copy: all of its classes train, go on, and may be anywhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
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


@pytest.mark.parametrize(
    "name",
    [
        "template.Mine",
        *(f"variants.{x}" for x in ("FromDataset", "FromItems", "OwnClass")),
    ],
)
def test_it_trains_and_goes_on_exactly(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["trainer", f"--params={name}", *SHORT]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*command, f"--logdir={whole}"]) == 0
    assert "accuracy" in capsys.readouterr().out
    if name == "variants.OwnClass":  # Its data are those of `Mine`.
        return
    shutil.copytree(whole, stopped)
    for step in store.steps(stopped / "checkpoints")[1:]:
        store.remove(store.place(stopped / "checkpoints", step))
    assert main([*command, f"--logdir={stopped}"]) == 0
    printed = capsys.readouterr().out
    assert "Going on from step 2." in printed
    assert ("Skipping 2 batches of a tf.data.Dataset" in printed) == (
        name == "variants.FromDataset"
    )
    assert runs.timeless(stopped) == runs.timeless(whole)


def test_a_class_is_found_in_any_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    shutil.copy(template.__file__, package / "my_file.py")
    monkeypatch.syspath_prepend(tmp_path)
    found = find("my_package.my_file.Mine")
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
        (lambda x, y: x, r"expected inputs and targets, such as \(x, y\)"),
        (lambda x, y: (x, np.eye(8)[y]), r"labels of shape \(\) each, .* one-hot"),
        (lambda x, y: (x, y + 1), r"from 0 to 7, as the network has 8 .* received 8"),
    ],
)
def test_examples_that_do_not_fit_the_network_are_refused(
    change: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    given = change(*template.Mine().examples("train"))
    monkeypatch.setattr(template.Mine, "examples", lambda self, split: given)
    argv = ["trainer", "--params=template.Mine", *SHORT, f"--logdir={tmp_path}"]
    assert main(argv) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_network_of_unknown_input_is_refused() -> None:
    class NoInput(template.Mine):
        def network(self) -> keras.Model:
            return keras.Sequential([keras.layers.Dense(8)])

    with pytest.raises(HyperparameterError, match=r"Begin a Sequential with keras"):
        NoInput().build_model()


def test_a_group_is_changed_without_an_annotation() -> None:
    class Longer(template.Mine):
        training = template.Mine.training.replace(num_steps=7)

    assert Longer().training.num_steps == 7
    assert Longer(training=Longer().training.replace(num_steps=8)).width == 64
    with pytest.raises(HyperparameterError, match="training: expected a Training"):
        type("Wrong", (template.Mine,), {"training": 3})()


def test_a_network_on_images_takes_their_shape_and_classes() -> None:
    network = find("variants.OnImages")().network()
    assert (network.input_shape, network.output_shape) == ((None, 8, 8, 1), (None, 10))
