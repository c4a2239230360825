"""The file that users copy: all of its classes train, go on, and may be anywhere."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import runs
from tfgpipe.stage import progress
from tfgpipe_params import template
from tfgpipe_trainer import hooks, validate_data
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.evaluate import evaluate, show_comparison
from tfgpipe_trainer.experiment import Experiment, find
from tfgpipe_trainer.hyperparams import HyperparameterError, override
from tfgpipe_trainer.main import main
from tfgpipe_trainer.writers import read_metrics

SHORT = [
    "--set=training.num_steps=6",
    "--set=training.log_every=1",
    "--set=width=8",
    "--set=checkpoint.every_steps=2",
]


@pytest.fixture(autouse=True)
def _without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages come first, however slow the machine traces."""
    monkeypatch.setattr(progress, "_DELAY", math.inf)


@pytest.mark.parametrize(
    "name",
    [
        "template.Mine",
        *(f"variants.{x}" for x in ("FromDataset", "FromItems", "SubclassedModel")),
    ],
)
def test_it_trains_and_goes_on_exactly(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["trainer", f"--params={name}", *SHORT]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*command, f"--logdir={whole}"]) == 0
    assert "accuracy" in capsys.readouterr().out
    if name == "variants.SubclassedModel":  # Its data are those of `Mine`.
        return
    shutil.copytree(whole, stopped)
    for step in store.steps(stopped / "checkpoints")[1:]:
        store.remove(store.path_of(stopped / "checkpoints", step))
    assert main([*command, f"--logdir={stopped}"]) == 0
    printed = capsys.readouterr().out
    assert "Going on from step 2." in printed
    assert ("Skipping 2 batches of a tf.data.Dataset" in printed) == (
        name == "variants.FromDataset"
    )
    assert runs.timeless(stopped) == runs.timeless(whole)


def test_no_point_of_validation_is_trained_on() -> None:
    train, validation = (
        {tuple(point) for point in template.Mine().examples(split)[0]}
        for split in ("train", "validation")
    )
    assert len(train) == len(validation) == 10_000
    assert not train & validation


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
        (
            lambda x, y: (x, y.astype(str)),
            r"dense arrays of numbers; received .*string",
        ),
        (
            lambda x, y: (x.astype("c8"), y),
            r"dense arrays of numbers; received .*compl",
        ),
        (
            lambda x, y: tf.data.Dataset.from_tensor_slices(
                (tf.RaggedTensor.from_tensor(x), y)
            ),
            "dense arrays of numbers; received RaggedTensorSpec",
        ),
        (
            lambda x, y: tf.data.Dataset.from_tensor_slices(
                (tf.sparse.from_dense(x), y)
            ),
            "dense arrays of numbers; received SparseTensorSpec",
        ),
        (lambda x, y: ([None] * len(y), y), r"Python objects, such as None"),
        (lambda x, y: [(np.array([1, None, 2]), 0)] * 99, "Python objects, such as 1"),
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


def _said(monkeypatch, tmp_path: Path, capsys, **hooks: Any) -> str:
    """Returns what a run of `Mine` with other methods ends with."""
    for name, hook in hooks.items():
        monkeypatch.setattr(template.Mine, name, hook)
    argv = ["trainer", "--params=template.Mine", *SHORT, f"--logdir={tmp_path}"]
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert "step 1/" not in printed.out
    return printed.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: (x[:, :2], y), r"inputs of shape \(3,\) each, .* \(2,\)"),
        (lambda x, y: (x, y + 1), r"from 0 to 7, as the network has 8 .* received 8"),
        (
            lambda x, y: tf.data.Dataset.from_tensor_slices((x[:0], y[:0])),
            "expected at least one; received none",
        ),
    ],
)
def test_validation_data_are_looked_at_before_training(
    change: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    own = template.Mine.examples

    def examples(self: Any, split: Any) -> Any:
        return own(self, split) if split == "train" else change(*own(self, split))

    said = _said(monkeypatch, tmp_path, capsys, examples=examples)
    assert re.match(rf'examples\("validation"\): .*{words}', said)


@pytest.mark.parametrize(
    ("hook", "returned", "words"),
    [
        (
            "network",
            None,
            r"^Mine: expected `network\(\)` to return a keras\.Model; rec",
        ),
        (
            "loss",
            None,
            r"^Mine: expected `loss\(\)` to return a keras\.losses\.Loss; r",
        ),
        (
            "loss",
            3,
            r"^Mine: expected `loss\(\)` to return a keras\.losses\.Loss; rece",
        ),
        (
            "loss",
            lambda y, p: 3.0,
            "^loss: expected a loss that depends on the network's",
        ),
        (
            "loss",
            lambda y, p: None,
            "^loss: expected a loss that depends on the network",
        ),
        (
            "loss",
            lambda y, p: tf.reduce_sum(y),
            "^loss: expected a loss that depends on",
        ),
        (
            "metrics",
            None,
            r"^Mine: expected `metrics\(\)` to return a list of keras\.me",
        ),
        (
            "metrics",
            "accuracy",
            r"^Mine: expected `metrics\(\)` to return a list of ker",
        ),
        *(
            (hook, None, rf"^Mine: expected `{hook}\(\)` to return a ")
            for hook in ("batches", "file_hashes")
        ),
        (
            "loss",
            "crossentropie",
            r"^Mine: expected `loss\(\)` to return a keras\.losses",
        ),
        (
            "loss",
            keras.losses.SparseCategoricalCrossentropy,
            r"^Mine: expected `loss\(\)` to return a keras\.losses",
        ),
        ("examples", None, r"^examples: expected arrays such as \(x, y\).* a NoneType"),
        (
            "transform",
            None,
            "^transform: expected it to return a batch, .* received Non",
        ),
    ],
)
def test_a_method_that_returns_something_else_is_named(
    hook: str, returned: Any, words: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    said = _said(monkeypatch, tmp_path, capsys, **{hook: lambda *_, **__: returned})
    assert re.match(words, said)


@pytest.mark.parametrize("returned", [None, "none", {"guessing": "bad"}])
def test_baselines_are_losses_by_name(returned: Any, monkeypatch) -> None:
    monkeypatch.setattr(template.Mine, "baselines", lambda _: returned)
    with pytest.raises(
        HyperparameterError, match=r"^Mine: expected `baselines\(\)` to"
    ):
        hooks.call(template.Mine(), "baselines")


def test_a_baseline_does_not_take_the_place_of_what_is_measured(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(template.Mine, "baselines", lambda _: {"loss": -1.0})
    argv = ["trainer", "--params=template.Mine", *SHORT, f"--logdir={tmp_path}"]
    assert main(argv) == 0
    *_, last = read_metrics(tmp_path / "metrics.jsonl")
    assert last["validation_loss"] > 0


@pytest.mark.parametrize("returned", [None, {"bit": 0.0}, {"bit": "none"}])
def test_report_units_are_numbers_above_zero(returned: Any, monkeypatch) -> None:
    monkeypatch.setattr(template.Mine, "report_units", lambda _: returned)
    with pytest.raises(
        HyperparameterError, match=r"^Mine: expected `report_units\(\)`"
    ):
        show_comparison(template.Mine(), {"loss": 1.0}, {})


def test_rules_of_quantization_are_by_class(monkeypatch) -> None:
    monkeypatch.setattr(template.Mine, "quantize_rules", lambda _: [1])
    mine = override(template.Mine(), ["precision.quantize=8bit"])
    with pytest.raises(HyperparameterError, match=r"^Mine: expected `quantize_rules"):
        mine.build_model()


def test_a_network_with_a_call_of_its_own_is_refused_as_one(monkeypatch) -> None:
    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    own = Own()
    own.built = True
    monkeypatch.setattr(template.Mine, "network", lambda _: own)
    with pytest.raises(HyperparameterError, match=r"^pipelining: A pipeline partit"):
        template.Mine().build_model()


def test_a_metric_is_a_number() -> None:
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=[keras.metrics.F1Score(name="f")])
    data = tf.data.Dataset.from_tensors((np.zeros((4, 3)), np.eye(2)[[0, 1, 0, 1]]))
    with pytest.raises(HyperparameterError, match=r"^metrics: .* 'f', of shape \(2,\)"):
        evaluate(model, data)


def test_a_transform_that_changes_later_is_named(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    def transform(self: Any, batch: Any, step: int, rows: slice) -> Any:
        return batch if step < 2 else (*batch, np.ones(len(batch[1])))

    monkeypatch.setattr(template.Mine, "transform", transform)
    argv = ["trainer", "--params=template.Mine", *SHORT, f"--logdir={tmp_path}"]
    assert main(argv) == 2
    words = "^examples: expected batches of arrays of the same shapes, after"
    assert re.match(words, capsys.readouterr().err)


def test_a_metric_does_not_take_the_place_of_the_loss(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    metric = keras.metrics.SparseCategoricalAccuracy(name="loss")
    said = _said(monkeypatch, tmp_path, capsys, metrics=lambda _: [metric])
    assert said.startswith(
        "Mine: expected metrics of `metrics()` by names other than 'l"
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (slice(0), "examples: expected a batch for each of .*=6; received fewer"),
        (
            slice(None),
            "examples: expected whole numbers as labels, for",
        ),
        # Of the second step.
        (
            slice(0, 80),
            "examples: expected whole numbers as labels, for",
        ),
    ],
)
def test_data_of_training_are_looked_at_as_they_come(
    rows: slice, words: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    own = template.Mine.examples
    labels = np.full(200, 0.75)
    labels[: 70 if rows.stop else 0] = 1
    arrays = (np.zeros((200, 3), "f4")[rows], labels[rows])
    found = tf.data.Dataset.from_tensor_slices(arrays)

    def examples(self: Any, split: Any) -> Any:
        return found if split == "train" else own(self, split)

    monkeypatch.setattr(template.Mine, "examples", examples)
    argv = ["trainer", "--params=template.Mine", *SHORT, f"--logdir={tmp_path}"]
    assert main(argv) == 2
    assert re.match(words, capsys.readouterr().err)


def test_a_loss_of_the_network_may_be_all_that_is_learnt() -> None:
    class Adds(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.mean(x**2))
            return x

    keras.utils.clear_session()
    model = tfgpipe.PipelinedModel(
        keras.Sequential([keras.Input([3]), keras.layers.Dense(8), Adds()]),
        num_stages=1,
        num_microbatches=1,
    )
    spec = (tf.TensorSpec([4, 3]), tf.TensorSpec([4]))
    validate_data.check_loss(model, lambda y, p: 0.0, spec)


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
    network = find("variants.CustomImageModel")().network()
    assert (network.input_shape, network.output_shape) == ((None, 8, 8, 1), (None, 10))
