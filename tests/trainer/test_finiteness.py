"""A loss or gradient that is not finite ends a run, or the step is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import runs
from tfgpipe_trainer.callbacks import Finiteness, Profile, not_finite
from tfgpipe_trainer.checkpoint import store, variable_names
from tfgpipe_trainer.checkpoint.run_state import RunState
from tfgpipe_trainer.config import Optimizer, Training
from tfgpipe_trainer.errors import DivergedError
from tfgpipe_trainer.main import main

layers = keras.layers
X = np.random.default_rng(0).normal(size=(6, 8, 4)).astype("float32")
BAD = 3


@pytest.fixture(scope="module", params=["alone", "replicas"])
def made(request: pytest.FixtureRequest) -> Any:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)

    def make() -> tfgpipe.PipelinedModel:
        made = tfgpipe.PipelinedModel(
            [
                layers.Dense(4, activation="tanh"),
                layers.BatchNormalization(),
                layers.Dense(4, activation="tanh"),
                layers.Dense(1),
            ],
            num_stages=2,
            num_microbatches=2,
            batch_norm="deferred",
        )
        made(keras.Input([4]))
        made.compile(Optimizer(ema_decay=0.9).build(6), "mse")
        made.optimizer.build(made.trainable_variables)
        return made

    if request.param == "alone":
        return make()
    with tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2).scope():
        return make()


@pytest.fixture
def model(made: Any) -> Iterator[Any]:
    """The model, as it was before it was trained."""
    initial = {name: v.numpy() for name, v in _copies(made).items()}
    yield made
    for name, variable in variable_names.all_variables(made).items():
        variable.assign(initial[name])


def _copies(model: keras.Model) -> dict[str, tf.Tensor]:
    return variable_names.snapshot(variable_names.all_variables(model))


def _fit(model: Any, batches: np.ndarray, notes: RunState, **training: Any) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((batches, batches[..., :1]))
    model.fit(
        dataset,
        callbacks=[Finiteness(Training(**training), notes, first_step=0)],
        shuffle=False,
        verbose=0,
    )


def _values(model: keras.Model) -> dict[str, np.ndarray]:
    copied = variable_names.snapshot(variable_names.all_variables(model))
    return {
        name: value.numpy()
        for name, value in copied.items()
        if not name.endswith(("left_out", "was_finite"))
    }


def _spoilt(by: float) -> np.ndarray:
    batches = X.copy()
    batches[BAD - 1, 5, 2] = by
    return batches


@pytest.mark.parametrize("by", [np.nan, np.inf])
def test_a_skipped_step_changes_no_variable(by: float, model: Any) -> None:
    keras.utils.set_random_seed(0)
    initial = variable_names.snapshot(variable_names.all_variables(model))
    notes = RunState()
    _fit(model, _spoilt(by), notes, on_nonfinite="skip")
    received = _values(model)
    assert notes.skipped == [BAD]
    for name, variable in variable_names.all_variables(model).items():
        variable.assign(initial[name])
    _fit(model, np.delete(X, BAD - 1, axis=0), RunState())
    for name, value in _values(model).items():
        np.testing.assert_array_equal(received[name], value, err_msg=name)


def test_the_first_gradient_is_named(model: Any) -> None:
    with pytest.raises(
        DivergedError,
        match=r"the loss is nan at step 3, and the gradient of dense_2/bias was the "
        r"first that is not finite, then \d more\. Try a smaller",
    ):
        _fit(model, _spoilt(np.nan), RunState())


def test_data_that_are_not_finite_are_named_rather_than_a_rate(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.zeros((40, 8, 8, 1), np.float32)
    pixels[17, 3, 2] = np.inf
    pixels[20, 0, 1] = np.nan
    np.savez(tmp_path / "x.npz", x=pixels, y=np.arange(40) % 3)
    own = [f"--set=data.files={tmp_path / 'x.npz'}", "--set=augmentation.shift=0"]
    steps = ["--set=training.num_steps=32", "--mode=train"]
    assert main([*small, *own, *steps, f"--logdir={tmp_path / 'run'}"]) == 3
    error = capsys.readouterr().err
    assert re.match(
        r"Diverged: the data of step \d hold (inf in inputs, first in row \d at "
        r"feature 3, 2, 0|nan in inputs, first in row \d at feature 0, 1, 0), "
        r"in 1 of 4 rows\. "
        r"Mend the data, or leave such steps out",
        error,
    )
    assert "learning_rate" not in error


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((tf.zeros([2, 3]), tf.constant([1, 2])), ""),
        (tf.constant([0.0, -np.inf]), "-inf in inputs, first in row 1, in 1 of 2 rows"),
        (
            (tf.zeros([2]), {"a": tf.zeros([3]), "b": tf.fill([3], np.nan)}),
            "nan in targets['b'], first in row 0, in 3 of 3 rows",
        ),
        (
            ((tf.zeros([2]), tf.constant([[0.0], [np.nan]], tf.bfloat16)), None),
            "nan in inputs[1], first in row 1 at feature 0, in 1 of 2 rows",
        ),
    ],
)
def test_what_is_not_finite_in_a_batch(batch: Any, words: str) -> None:
    assert not_finite(batch) == words


def test_only_so_many_steps_are_left_out(model: Any) -> None:
    batches = _spoilt(np.nan)
    batches[BAD] = np.nan
    with pytest.raises(
        DivergedError,
        match=r"at step 4, .*Steps 3 were left out before it, as many as training\.max",
    ):
        _fit(model, batches, RunState(), on_nonfinite="skip", max_nonfinite_steps=1)


def test_a_run_that_diverges_keeps_what_was_good(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    wild = [
        "--set=optimizer.learning_rate=1e38",
        "--set=optimizer.global_clipnorm=None",
    ]
    wild += ["--set=training.num_steps=64", "--set=optimizer.name=sgd"]
    assert main([*small, *wild, f"--logdir={folder}"]) == 3
    error = capsys.readouterr().err
    # On a slow machine the progress of tracing stands before it.
    assert "\nDiverged: the loss is " in f"\n{error}"
    assert "Try a smaller optimizer.learning_rate" in error
    assert "--set=training.on_nonfinite=skip" in error
    for step in store.steps(folder / "checkpoints"):
        store.read(folder / "checkpoints", step)
    assert all(np.isfinite(loss) for _, loss in runs.losses(folder))
    # Even the last one goes on, by another way than it came.
    mended = [flag for flag in small if "learning_rate" not in flag]
    mended += ["--set=training.num_steps=64", f"--logdir={folder}", "--mode=train"]
    if store.steps(folder / "checkpoints"):
        assert main([*mended, "--set=optimizer.name=sgd", "--allow_changes"]) == 0


def test_metrics_are_reset_once_a_step(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[int] = []
    reset = type(model).reset_metrics
    monkeypatch.setattr(
        type(model), "reset_metrics", lambda self: resets.append(0) or reset(self)
    )
    callbacks = [
        Finiteness(Training(), RunState(), first_step=0),
        Profile(tmp_path, (100, 100), first_step=0),
    ]
    data = tf.data.Dataset.from_tensor_slices((X, X[..., :1]))
    model.fit(data, callbacks=callbacks, verbose=0)
    assert len(resets) <= len(X) + 2  # And Keras' own, of an epoch.
