"""Each mode, from its command line to its exit status, on one run."""

from __future__ import annotations

import csv
import errno
import functools
import shutil
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

import tfgpipe
from tests.helpers import runs
from tfgpipe_params.parallelism import SingleDevice as Classifier
from tfgpipe_trainer.callbacks import Checkpointing
from tfgpipe_trainer.checkpoint import store, variable_names
from tfgpipe_trainer.checkpoint.run_state import RunState
from tfgpipe_trainer.commands import runs as commands_runs
from tfgpipe_trainer.config import Evaluation, Pipelining, Training
from tfgpipe_trainer.errors import CheckpointError
from tfgpipe_trainer.evaluate import validated_part
from tfgpipe_trainer.experiment import Experiment, Split, output_names
from tfgpipe_trainer.hyperparams import HyperparameterError, field
from tfgpipe_trainer.main import main
from tfgpipe_trainer.preemption import Stopping


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """A run that has evaluated in between, with averaged weights, and its flags."""
    place = tmp_path_factory.mktemp("modes")
    folder = place / "run"
    flags = runs.flags(
        evaluation__every_steps=2,
        optimizer__ema_decay=0.5,
        optimizer__gradient_accumulation_steps=2,
        checkpoint__keep=9,
    )
    command = ["trainer", *flags, f"--logdir={folder}"]
    assert main(command) == 0
    return command, folder


def test_a_run_evaluates_in_between_and_keeps_the_best(trained) -> None:
    _, folder = trained
    validations = [r for r in runs.records(folder) if "validation_loss" in r]
    assert [r["step"] for r in validations] == [2, 4, 6, 8, 8]
    assert [bool(r.get("final")) for r in validations] == [False] * 4 + [True]
    assert validations[-1]["validation_loss"] == validations[-2]["validation_loss"]
    notes = store.metadata(folder / "checkpoints", 8).notes
    best = min(validations[:4], key=lambda r: r["validation_loss"])
    assert notes["best_step"] == best["step"]
    assert notes["best_value"] == best["validation_loss"]


@pytest.mark.parametrize("checkpoint", ["best", "4"])
def test_any_checkpoint_is_evaluated(checkpoint: str, trained, capsys) -> None:
    command, folder = trained
    best = store.metadata(folder / "checkpoints", 8).notes["best_step"]
    number = best if checkpoint == "best" else int(checkpoint)
    assert main([*command, "--mode=eval", f"--checkpoint={checkpoint}"]) == 0
    printed = capsys.readouterr().out
    assert f"Loaded checkpoint, step {number}." in printed
    assert _line_of_the_model(folder, number) in printed


def _line_of_the_model(folder: Path, step: int) -> str:
    (record, *_) = (
        r for r in runs.records(folder) if r["step"] == step and "validation_loss" in r
    )
    return f"{'model':10}  {record['validation_loss']:10.4f}"


def test_the_folder_of_a_run_says_what_to_evaluate(trained, capsys) -> None:
    _, folder = trained
    assert main(["trainer", "--mode=eval", f"--logdir={folder}"]) == 0
    printed = capsys.readouterr().out
    assert "Loaded checkpoint, step 8." in printed
    assert _line_of_the_model(folder, 8) in printed
    changed = "--set=evaluation.max_batches=1"
    assert main(["trainer", "--mode=eval", f"--logdir={folder}", changed]) == 0
    assert capsys.readouterr().out.startswith(
        "Changed, for --mode=eval alone:\nevaluation.max_batches: 2 -> 1\n"
    )
    # What the checkpoint does not fit is refused, as are the names of others.
    argv = ["trainer", "--mode=export", f"--logdir={folder}", "--set=model.width=9"]
    assert main(argv) == 2
    assert "Expected a checkpoint of this model" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_is_refused(trained, capsys) -> None:
    command, folder = trained
    assert main([*command, "--mode=eval", "--checkpoint=5"]) == 1
    assert capsys.readouterr().err == (
        "Expected --checkpoint to be one of 2, 4, 6, 8, which are in "
        f"{folder / 'checkpoints'}; received 5.\n"
    )


def test_following_evaluates_each_until_the_run_ends(trained, capsys) -> None:
    command, folder = trained
    assert main([*command, "--mode=eval", "--watch"]) == 0
    *others, record = runs.records(folder, "eval")
    assert [each["step"] for each in others] == [2, 4, 6]
    (final,) = (r for r in runs.records(folder) if r.get("final"))
    del final["final"], final["validation_guessing"]
    assert record == final
    printed = capsys.readouterr().out
    assert "step 8: validation loss " in printed
    assert printed.endswith(f"Training in {folder} ended; no more checkpoints.\n")
    # What is measured is not measured again.
    measured = runs.records(folder, "eval")
    assert main([*command, "--mode=eval", "--watch"]) == 0
    assert "step 8" not in capsys.readouterr().out
    assert runs.records(folder, "eval") == measured


def test_following_a_run_that_dies_before_its_first_checkpoint_ends(
    tmp_path: Path,
) -> None:
    experiment = mock.Mock(evaluation=Evaluation(), training=Training())
    job = mock.Mock(experiment=experiment, folder=tmp_path)
    with pytest.raises(CheckpointError, match="the run there has ended before its fir"):
        commands_runs.evaluate(job)


def test_all_validation_examples_are_taken_unless_fewer_are_asked_for(
    trained, tmp_path: Path, capsys
) -> None:
    _, folder = trained
    copy = shutil.copytree(folder, tmp_path / "run")
    size = Classifier().num_validation_examples()
    assert Evaluation().max_batches is None
    assert main(["trainer", "--mode=eval", f"--logdir={copy}"]) == 0
    assert capsys.readouterr().out.endswith(f"\non 8 of {size} examples\n")
    every = "--set=evaluation.max_batches=None"
    assert main(["trainer", "--mode=decode", f"--logdir={copy}", every]) == 0
    assert f" of {size} validation images" in capsys.readouterr().out
    with (copy / "decode" / "predictions.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == size


@pytest.mark.parametrize("mode", ["decode", "export"])
def test_a_file_in_place_of_a_folder_is_refused(
    mode: str, trained, tmp_path: Path, capsys
) -> None:
    _, folder = trained
    copy = shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(copy / mode, ignore_errors=True)
    (copy / mode).touch()
    assert main(["trainer", f"--mode={mode}", f"--logdir={copy}"]) == 1
    assert capsys.readouterr().err.startswith(
        f"Expected a --logdir that can be written to; {copy / mode} cannot: File "
        "exists.\n"
    )


@keras.saving.register_keras_serializable("tests")
class FailsLater(keras.layers.Layer):
    """Is called once, for the network, and not a second time."""

    num_calls = 0

    def call(self, x):
        FailsLater.num_calls += 1
        if FailsLater.num_calls > 1:
            raise ValueError("of the user's own")
        return x


class Failing(Experiment):
    """An error of the user's layer."""

    def network(self) -> keras.Model:
        FailsLater.num_calls = 0
        return keras.Sequential(
            [keras.Input((3,)), FailsLater(), keras.layers.Dense(2)]
        )


def test_an_error_of_a_users_layer_is_no_wrong_hyperparameter() -> None:
    # The costs of layers are found by calling them.
    pipelining = Pipelining(num_stages=2, num_microbatches=2, balance="flops")
    experiment: Experiment = Failing(pipelining=pipelining)
    with pytest.raises(ValueError, match="of the user's own") as error:
        experiment.build_model()
    assert not isinstance(error.value, HyperparameterError)
    # What tfgpipe refuses is one.
    experiment = TwoHeads(
        pipelining=Pipelining(num_stages=2, layers_per_stage=(1, 2, 3))
    )
    with pytest.raises(HyperparameterError, match=r"^pipelining: "):
        experiment.build_model()


class TwoHeads(Experiment):
    """A kind and a size."""

    pipelining = Pipelining(num_stages=2, num_microbatches=2)
    by_name: bool = field(default=True, help="Whether outputs have names.")

    def network(self) -> keras.Model:
        inputs = keras.Input((3,))
        hidden = keras.layers.Dense(4)(inputs)
        heads = [keras.layers.Dense(n, name=f"head{n}")(hidden) for n in (3, 1)]
        named = {"kind": heads[0], "size": heads[1]}
        return keras.Model(inputs, named if self.by_name else heads)

    def loss(self) -> Any:
        found = {"kind": super().loss(), "size": keras.losses.MeanSquaredError()}
        return found if self.by_name else list(found.values())

    def metrics(self) -> Any:
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        error = keras.metrics.MeanAbsoluteError(name="error")
        if self.by_name:
            return {"kind": [accuracy], "size": [error]}
        return [accuracy, error]


class Endless(TwoHeads):
    """A dataset without end."""

    def examples(self, split: Split) -> Any:
        return tf.data.Dataset.from_tensors(
            (np.zeros(3), {"kind": 0, "size": 0})
        ).repeat()


def test_validation_without_end_needs_a_number_of_batches() -> None:
    with pytest.raises(
        HyperparameterError, match=r"max_batches: expected a number, as"
    ):
        Endless().batches("validation")
    some = Endless(evaluation=Evaluation(max_batches=3))
    assert len(list(some.batches("validation"))) == 3
    assert validated_part(some) == "at most 96 examples"
    # Nor does an experiment with batches of its own say how many there are.
    own = TwoHeads(evaluation=Evaluation(max_batches=3))
    assert validated_part(own) == "at most 96 examples"


@pytest.mark.parametrize("by_name", [True, False])
def test_the_metrics_of_several_outputs_are_called_as_keras_calls_them(
    by_name: bool,
) -> None:
    metric = "kind_accuracy" if by_name else "head3_accuracy"
    experiment = TwoHeads(
        by_name=by_name, evaluation=Evaluation(every_steps=1, metric=metric)
    )
    model = experiment.build_model()
    x, y = np.zeros((8, 3), "f4"), {"kind": np.zeros(8, int), "size": np.zeros((8, 1))}
    targets = y if by_name else tuple(y.values())
    measured = model.evaluate(x, targets, verbose=0, return_dict=True)
    for name in measured:
        evaluation = Evaluation(metric=name, every_steps=1)
        evaluation.check(experiment.metrics(), output_names(model.unpipelined()))
    assert metric in measured
    with pytest.raises(HyperparameterError, match=f"expected one of .*{metric}"):
        experiment.replace(evaluation=Evaluation(metric="accuracy")).build_model()


def test_decoding_writes_what_the_run_has(trained, capsys) -> None:
    command, folder = trained
    path = folder / "decode" / "predictions.csv"
    written = path.read_text()
    path.unlink()
    assert main([*command, "--mode=decode"]) == 0
    assert path.read_text() == written
    (final,) = (r for r in runs.records(folder) if r.get("final"))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    right = np.mean([row["label"] == row["predicted"] for row in rows])
    assert right == pytest.approx(final["validation_accuracy"])
    assert f"accuracy {right:.1%} of {len(rows)} vali" in capsys.readouterr().out


def test_exporting_gives_files_that_need_no_pipeline(trained, capsys) -> None:
    command, folder = trained
    assert main([*command, "--mode=export"]) == 0
    assert "The int8 file, " in capsys.readouterr().out
    x = np.random.default_rng(0).random((3, 8, 8, 1), np.float32)
    loaded = keras.models.load_model(folder / "export" / "model.keras")
    served = tf.saved_model.load(str(folder / "export" / "saved_model"))
    (outputs,) = served.signatures["serving_default"](tf.constant(x)).values()
    np.testing.assert_allclose(outputs, loaded(x), rtol=1e-5, atol=1e-6)
    written = store.read(folder / "checkpoints", 8).values
    tensors = load_file(folder / "export" / "model.safetensors")
    assert tensors.keys() == variable_names.weights(loaded).keys()
    for name, variable in variable_names.weights(loaded).items():
        average = written[f"optimizer/{name}/average"]
        np.testing.assert_array_equal(variable, average, err_msg=name)
        np.testing.assert_array_equal(tensors[name], average, err_msg=name)


def test_a_dry_run_leaves_nothing(small: list[str], tmp_path: Path, capsys) -> None:
    before = sorted(tmp_path.iterdir())
    assert main([*small, "--smoke_test", f"--logdir={tmp_path / 'run'}"]) == 0
    printed = capsys.readouterr().out
    assert "A step on zeros: loss " in printed
    assert "imbalance" in printed
    assert sorted(tmp_path.iterdir()) == before


def test_a_benchmark_says_how_fast_it_is(small: list[str], tmp_path, capsys) -> None:
    before = sorted(tmp_path.iterdir())
    small += ["--set=optimizer.gradient_accumulation_steps=2"]
    assert main([*small, "--mode=benchmark"]) == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in lines] == ["first", "step", "speed", "bubble"]
    assert "images a second" in lines[2]
    assert sorted(tmp_path.iterdir()) == before


def test_tuning_ends_with_flags_for_the_fastest_pipeline(
    small: list[str], tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(tfgpipe, "tune", functools.partial(tfgpipe.tune, max_trials=2))
    before = sorted(tmp_path.iterdir())
    assert main([*small, "--mode=tune"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\ntrial ") == 2
    flags = printed.splitlines()[-1].split()
    assert {flag.rpartition("=")[0] for flag in flags} >= {
        f"--set=pipelining.{name}"
        for name in ("num_stages", "schedule", "layers_per_stage")
    }
    assert main([*small, *flags, "--smoke_test", f"--logdir={tmp_path / 'run'}"]) == 0
    assert sorted(tmp_path.iterdir()) == before
    assert main([*small, "--mode=tune", "--set=pipelining.num_replicas=2"]) == 2
    assert "num_replicas: expected 1" in capsys.readouterr().err


def test_a_step_is_verified(small: list[str], tmp_path, capsys) -> None:
    before = sorted(tmp_path.iterdir())
    assert main([*small, "--mode=verify"]) == 0
    printed = capsys.readouterr().out
    assert "one training step; largest differences" in printed
    assert "Equal to plain Keras" in printed
    assert sorted(tmp_path.iterdir()) == before
    assert main([*small, "--mode=verify", "--set=pipelining.num_replicas=2"]) == 0
    printed = capsys.readouterr().out
    assert ": D=2, K=" in printed
    assert "Equal to plain Keras" in printed


def test_training_alone_does_not_evaluate_and_may_be_profiled(
    small, tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "run"
    small += [f"--logdir={folder}", "--set=training.num_steps=3", "--mode=train"]
    # The steps to look at are steps of training, not updates, of which this has one.
    small += [
        "--set=evaluation.every_steps=2",
        "--set=optimizer.gradient_accumulation_steps=2",
    ]
    steps = ["--trace_steps=2,3", "--profile_steps=2,3"]
    assert main([*small, *steps]) == 0
    assert not any("validation_loss" in r for r in runs.records(folder))
    assert not (folder / "decode").exists()
    printed = capsys.readouterr().out
    assert "The profile is in " in printed
    assert "measured, 2 steps of " in printed
    assert list(folder.rglob("*.xplane.pb"))
    # What needs evaluations is refused.
    assert main([*small, "--set=evaluation.patience=2"]) == 2
    assert capsys.readouterr().err == (
        "evaluation.patience: expected None, as --mode=train does not evaluate; "
        "received 2. Use --mode=train_and_eval.\n"
    )


def test_differences_of_experiments_and_runs_are_listed(trained, capsys) -> None:
    _, folder = trained
    assert main(["trainer", "--mode=diff", "parallelism.Pipelined", str(folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "model.width: 128 -> 8" in printed
    assert "optimizer.ema_decay: None -> 0.5" in printed
    assert main(["trainer", "--mode=diff", "lm.Tiny", "lm.Tiny"]) == 0
    assert capsys.readouterr().out == "No difference.\n"
    assert main(["trainer", "--mode=diff", "lm.Tiny", "lm.Tyni"]) == 2
    assert "Did you mean lm.Tiny?" in capsys.readouterr().err


def test_early_stopping_ends_a_run_for_good(small, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    # Nothing is learnt, so no evaluation is better than the first.
    small += ["--set=optimizer.learning_rate=0", "--set=evaluation.every_steps=1"]
    small += ["--set=evaluation.patience=2", f"--logdir={folder}"]
    assert main(small) == 0
    printed = capsys.readouterr().out
    assert (
        "Stopping early: of the last 2 evaluations none was better than los" in printed
    )
    assert store.steps(folder / "checkpoints")[-1] == 3
    records = runs.records(folder)
    assert main(small) == 0
    assert "Tracing" not in capsys.readouterr().out
    assert runs.records(folder) == records


def test_a_metric_that_is_not_there_is_refused(small, tmp_path: Path, capsys) -> None:
    small += ["--set=evaluation.metric=iou", "--set=evaluation.every_steps=4"]
    assert main([*small, f"--logdir={tmp_path / 'run'}"]) == 2
    printed = capsys.readouterr()
    assert printed.err == (
        "evaluation.metric: expected one of accuracy, loss; received 'iou'.\n"
    )
    assert "Tracing" not in printed.out


def _compared(
    *values: float, mode: Literal["min", "max"] | None = None, name: str
) -> RunState:
    """Returns the notes of a run whose evaluations measure these values."""
    experiment = Classifier(
        evaluation=Evaluation(metric=name, mode=mode, every_steps=1, patience=9)
    )
    notes, measured = RunState(), iter(values)
    checkpoints = mock.Mock()
    checkpoints.coordinator.any = lambda *said: said
    checkpointing = Checkpointing(
        experiment,
        checkpoints,
        notes,
        Stopping(status=0),
        lambda step: {name: next(measured)},
        mock.MagicMock(),
        first_step=0,
    )
    for step in range(1, len(values) + 1):
        checkpointing.end(step, 0.0)
    return notes


def test_the_metric_says_which_checkpoint_is_the_best() -> None:
    assert _compared(0.5, 0.75, 0.625, name="accuracy").best_step == 2
    assert _compared(0.5, 0.75, 0.25, name="loss").best_step == 3
    # Unless the user does.
    assert _compared(0.5, 0.75, name="accuracy", mode="min").best_step == 1


def test_a_metric_of_which_nobody_says_what_is_better_is_refused() -> None:
    metrics = [keras.metrics.FalsePositives(name="wrong")]
    Evaluation(metric="wrong").check(metrics)  # Nothing is compared.
    Evaluation(metric="wrong", every_steps=1, mode="min").check(metrics)
    with pytest.raises(
        HyperparameterError,
        match=r"^evaluation\.mode: expected min or max, .* 'wrong', a FalsePos",
    ):
        Evaluation(metric="wrong", every_steps=1).check(metrics)


def test_a_run_goes_on_in_another_cut_if_that_is_allowed(
    trained, tmp_path: Path, capsys
) -> None:
    command, whole = trained
    cut, step = tmp_path / "cut", "step-00000004"
    shutil.copytree(whole / "checkpoints" / step, cut / "checkpoints" / step)
    shutil.copy(whole / "params.txt", cut)
    other = [
        "--set=pipelining.num_stages=1",
        "--set=pipelining.num_microbatches=4",
        "--set=pipelining.schedule=gpipe",
        "--set=pipelining.remat=stage",
        "--set=pipelining.num_replicas=2",
        "--set=evaluation.every_steps=None",
    ]
    argv = [*command, *other, "--mode=train", f"--logdir={cut}"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "pipelining.num_stages: 2 -> 1" in error
    assert "by --allow_changes" in error
    assert main([*argv, "--allow_changes"]) == 0
    printed = capsys.readouterr().out
    assert "Changed from step 4:" in printed
    assert "Going on from step 4." in printed
    for (step, loss), (same, expected) in zip(
        runs.losses(cut), runs.losses(whole)[4:], strict=True
    ):
        assert step == same
        assert loss == pytest.approx(expected, rel=1e-5)
    changes = (cut / "changes.txt").read_text().splitlines()
    assert changes[0] == "# from step 4"
    assert "pipelining.num_stages: 2 -> 1" in changes


def test_a_folder_of_another_run_is_refused_with_the_difference(
    trained, capsys
) -> None:
    command, folder = trained
    metrics = (folder / "metrics.jsonl").read_text()
    assert main([*command, "--set=model.num_blocks=3"]) == 2
    assert capsys.readouterr().err == (
        f"{folder} holds a run of other hyperparameters (its -> yours):\n\n"
        "model.num_blocks: 1 -> 3\n\n"
        "Give another --logdir, or its hyperparameters, or go on with yours by "
        "--allow_changes.\n"
    )
    other = [*command]
    other[1] = "--params=parallelism.DataParallel"
    for mode in ("train_and_eval", "eval"):
        assert main([*other, f"--mode={mode}"]) == 2
        error = capsys.readouterr().err
        assert "parallelism.Pipelined -> parallelism.DataParallel" in error
    assert (folder / "metrics.jsonl").read_text() == metrics


def test_a_folder_that_cannot_be_written_is_refused(small, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main([*small, f"--logdir={tmp_path / 'file' / 'run'}"]) == 1
    assert "Expected a --logdir that can be written to; " in capsys.readouterr().err


def test_a_run_whose_checkpoints_cannot_be_written_fails_at_its_end(
    small: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    def full(*_) -> None:
        raise OSError(errno.EIO, "Input/output error")

    folder = tmp_path / "run"
    monkeypatch.setattr(store, "write_tensors", full)
    small += ["--set=training.num_steps=3", "--mode=train", f"--logdir={folder}"]
    assert main(small) == 1
    printed = capsys.readouterr()
    assert "step 3/3" in printed.out
    assert printed.err.count("could not be written: ") == 2
    assert "The last checkpoint, of step 3, could not be written to " in printed.err
