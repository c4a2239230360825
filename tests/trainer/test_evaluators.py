"""Evaluations beside that of the validation split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import runs
from tfgpipe_params import template
from tfgpipe_trainer import evaluators
from tfgpipe_trainer.evaluators import Evaluator, OnData
from tfgpipe_trainer.hyperparams import HyperparameterError
from tfgpipe_trainer.main import main

SHORT = [
    *(f"--params={__name__}.Mine", "--set=training.num_steps=6", "--set=width=8"),
    *("--set=training.log_every=3", "--set=checkpoint.every_steps=2"),
]


class Steps(Evaluator):
    """Counts its calls, and the model's weights."""

    every_steps = 2

    def evaluate(self, model: keras.Model) -> dict[str, float]:
        """Returns both."""
        return {"weights": len(model.trainable_variables)}


class Mine(template.Mine):
    """The template with two further evaluations."""

    def evaluators(self) -> dict[str, Evaluator]:
        """Returns one on the training's examples, one of another kind."""
        metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        data = OnData(self.examples("validation"), [self.loss(), metric], every_steps=3)
        return {"again": data, "own": Steps()}


class Wrong(template.Mine):
    """Returns what is no evaluator."""

    def evaluators(self) -> Any:
        """Returns a metric."""
        return {"test": keras.metrics.Mean()}


def test_each_is_made_at_its_steps_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer", *SHORT, f"--logdir={tmp_path}"]) == 0
    records = runs.records(tmp_path)
    again = {r["step"]: r["again_accuracy"] for r in records if "again_accuracy" in r}
    own = [r["step"] for r in records if "own_weights" in r]
    assert list(again) == [3, 6]
    assert own == [2, 4, 6, 6]
    (last,) = (r for r in records if "validation_accuracy" in r and r.get("final"))
    assert again[6] == last["validation_accuracy"]
    (loss,) = (r["again_loss"] for r in records if r.get("final") and "again_loss" in r)
    assert loss == pytest.approx(last["validation_loss"], rel=1e-5)
    printed = capsys.readouterr().out
    assert f"step 6: again_loss {loss:.4f}, again_accuracy" in printed
    assert (
        main(
            [
                "trainer",
                f"--params={__name__}.Mine",
                "--mode=eval",
                f"--logdir={tmp_path}",
            ]
        )
        == 0
    )
    assert f"\nagain_loss {loss:.4f}, again_accuracy" in capsys.readouterr().out


def test_what_is_no_evaluator_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--params={__name__}.Wrong", "--set=training.num_steps=1"]
    assert main(["trainer", *flags, f"--logdir={tmp_path}"]) == 2
    assert "expected `evaluators()` to return a dict of Evaluators" in (
        capsys.readouterr().err
    )

    class Text(Evaluator):
        def evaluate(self, model: keras.Model) -> Any:
            return {"bleu": "high"}

    with pytest.raises(HyperparameterError, match="numbers of 'test'; received 'high'"):
        evaluators.measured({"test": Text()}, ["test"], keras.Sequential())


@pytest.mark.parametrize("kind", ["arrays", "items", "dataset"])
def test_metrics_are_of_all_examples_each_once(kind: str) -> None:
    x = np.arange(10, dtype=np.float32)[:, None]
    y = np.arange(10, dtype=np.float32)[:, None] + 1
    data: Any = {
        "arrays": (x, y),
        "items": list(zip(x, y, strict=True)),
        "dataset": tf.data.Dataset.from_tensor_slices((x, y)),
    }[kind]
    model = keras.Sequential([keras.Input([1]), keras.layers.Lambda(lambda x: 2 * x)])
    metrics = [keras.losses.MeanSquaredError(), keras.metrics.MeanSquaredError("mse")]
    own = OnData(data, metrics, batch_size=4)
    expected = ((2 * x - y) ** 2).mean()
    for _ in range(2):
        wanted = pytest.approx(expected)
        assert own.evaluate(model) == {"loss": wanted, "mse": wanted}
    some = OnData(data, metrics, batch_size=4, num_examples=2)
    chosen = x[[0, 1]] if kind == "dataset" else x[[0, 9]]
    few = ((2 * chosen - chosen - 1) ** 2).mean()
    assert some.evaluate(model)["mse"] == pytest.approx(few)
