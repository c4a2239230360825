"""Weights that are not trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import runs
from tfgpipe_params import template
from tfgpipe_trainer.hyperparams import HyperparameterError, override
from tfgpipe_trainer.main import main


def test_frozen_weights_stay_and_all_else_is_as_in_keras() -> None:
    # In single precision, as experiments have no other without half.
    frozen = ["training.frozen=('dense/*','dense_2/bias')", "width=5"]
    experiment = override(template.Mine(), frozen)
    model = experiment.build_model()
    plain = experiment.network()
    pairs = zip(model.unpipelined().weights, plain.weights, strict=True)
    for own, theirs in pairs:
        theirs.assign(own)
    plain.layers[0].trainable = False
    plain.layers[2].bias.trainable = False
    own = experiment.metrics()
    plain.compile(experiment.optimizer.build(500), experiment.loss(), metrics=own)
    x, y = next(iter(experiment.batches("train")))
    before = [np.array(v) for v in model.unpipelined().weights]
    for _ in range(3):
        losses = model.train_on_batch(x, y), plain.train_on_batch(x, y)
        np.testing.assert_allclose(*losses, rtol=1e-6)
    after = [np.array(v) for v in model.unpipelined().weights]
    expected = [np.array(v) for v in plain.weights]
    for own, theirs in zip(after, expected, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-6)
    same = [(a == b).all() for a, b in zip(before, after, strict=True)]
    assert same == [True, True, False, False, False, True, False, False]


def test_a_run_goes_on_with_what_is_frozen(tmp_path: Path) -> None:
    flags = ["trainer", *runs.flags(training__frozen="dense/*")]
    assert main([*flags, f"--logdir={tmp_path / 'a'}"]) == 0
    half = ["--set=training.num_steps=4", "--set=optimizer.schedule=constant"]
    assert main([*flags, *half, f"--logdir={tmp_path / 'b'}"]) == 0
    longer = ["--set=optimizer.schedule=constant", "--allow_changes"]
    assert main([*flags, *longer, f"--logdir={tmp_path / 'b'}"]) == 0
    assert [step for step, _ in runs.losses(tmp_path / "b")] == [*range(1, 9)]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [("('conv*',)", "received 'conv.*matches none"), ("('*',)", "which are all")],
)
def test_patterns_have_to_match_some_and_leave_some(patterns: str, words: str) -> None:
    experiment = override(template.Mine(), [f"training.frozen={patterns}"])
    with pytest.raises(HyperparameterError, match=rf"^training\.frozen: .*{words}"):
        experiment.build_model()
