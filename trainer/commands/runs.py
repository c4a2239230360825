"""Modes on the folder of a run: train, eval, decode, export."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import keras
import numpy as np

import tfgpipe
from tfgpipe import quantization
from tfgpipe._util import readable_bytes
from tfgpipe_trainer import evaluate as evaluation
from tfgpipe_trainer import evaluators, hooks, run_dir
from tfgpipe_trainer import train as loop
from tfgpipe_trainer.checkpoint import store, variable_names
from tfgpipe_trainer.checkpoint.checkpoints import Checkpoints, latest_valid, load
from tfgpipe_trainer.commands.job import Job
from tfgpipe_trainer.errors import CheckpointError
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.hosts import Coordinator
from tfgpipe_trainer.writers import Metrics, read_metrics


def train(job: Job) -> None:
    """Trains the run of a folder, from its last checkpoint if there is one."""
    flags, experiment, model = job.flags, job.experiment, job.model
    options = loop.Options(
        name=flags.params,
        evaluates=flags.mode == "train_and_eval",
        trace_steps=flags.trace_steps,
        profile_steps=flags.profile_steps,
        started=flags.started,
    )
    coordinator = Coordinator(model, job.hosts)
    place = run_dir.checkpoints(job.folder)
    saved = Checkpoints(place, model, experiment.checkpoint, coordinator)
    with job.hosts.output_dir(job.folder) as own:
        loop.train(experiment, model, own, saved, job.stopping, options)
    if experiment.training.export and job.hosts.count == 1:
        write_files(experiment, model, job.folder)


_POLL_SECONDS = 1.0


def _evaluate_each(job: Job) -> None:
    """Evaluates every checkpoint, old and new, until nobody trains there any more.

    Measurements go to `eval.jsonl` and to TensorBoard; what is there is not measured
    again.
    """
    experiment, model, folder = job.experiment, job.model, job.folder
    checkpoints = run_dir.checkpoints(folder)
    validation = experiment.batches("validation")
    part = evaluation.validated_part(experiment)
    done = {record["step"] for record in read_metrics(folder / "eval.jsonl")}
    metrics = Metrics(
        folder,
        step=max(done, default=0),
        name="eval",
        writers=experiment.training.writers,
    )
    while True:
        # Asked first: what an ended run has saved last is seen by the line below.
        goes_on = run_dir.is_held(folder)
        new = [step for step in store.steps(checkpoints) if step not in done]
        for step in new:
            done.add(step)
            try:
                load(store.read(checkpoints, step), model)
            except store.DamagedError as error:
                # It may be gone again, if the run is faster than this.
                print(f"\nThe checkpoint of step {step} is passed over: {error}.")
                continue
            measured = evaluation.evaluate(model, validation)
            metrics.write_validation(step, measured)
            line = evaluation.line(measured, part)
            print(f"step {step}: {line}", flush=True)
        if not new and not goes_on:
            if not done:
                raise CheckpointError(
                    f"{folder} holds no checkpoint to evaluate: the run there has "
                    "ended before its first."
                )
            print(f"Training in {folder} ended; no more checkpoints.", flush=True)
            return
        time.sleep(_POLL_SECONDS)


def evaluate(job: Job) -> None:
    """Measures a checkpoint on the validation split, or each new one: `--watch`."""
    if job.flags.watch:
        _evaluate_each(job)
        return
    _load(job)
    experiment, model = job.experiment, job.model
    measured = evaluation.evaluate(model, experiment.batches("validation"))
    baselines = hooks.call(experiment, "baselines")
    evaluation.show_comparison(experiment, measured, baselines)
    further = hooks.call(experiment, "evaluators")
    with variable_names.ema_weights(model):
        values = evaluators.measured(further, [*further], model)
    if values:
        print(evaluators.line(values), flush=True)


def decode(job: Job) -> None:
    """Writes what a checkpoint makes of data it has not seen."""
    _load(job)
    evaluation.decode(job.experiment, job.model, job.folder)


def export(job: Job) -> None:
    """Writes the files of a trained model."""
    _load(job)
    write_files(job.experiment, job.model, job.folder)


def _load(job: Job) -> None:
    checkpoint = _chosen(job.flags.checkpoint, run_dir.checkpoints(job.folder))
    load(checkpoint, job.model)
    print(f"Loaded checkpoint, step {checkpoint.metadata.step}.", flush=True)


def _chosen(text: str, folder: Path) -> store.Checkpoint:
    """Reads the checkpoint that --checkpoint means.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is damaged.
    """
    newest = latest_valid(folder)
    assert newest is not None  # The folder holds a run.
    best = newest.metadata.notes["best_step"]
    if text == "latest":
        return newest
    if text == "best" and best is None:
        raise CheckpointError(
            f"Expected a run that has evaluated checkpoints; that of {folder} has not. "
            "Train with --set=evaluation.every_steps=N, or give --checkpoint=latest."
        )
    step = best if text == "best" else int(text)
    there = store.steps(folder)
    if step not in there:
        raise CheckpointError(
            f"Expected --checkpoint to be one of {', '.join(map(str, there))}, which "
            f"are in {folder}; received {step}."
        )
    try:
        return store.read(folder, step)
    except store.DamagedError as error:
        if not store.path_of(folder, step).exists():
            return _chosen(text, folder)  # A run that goes on has removed it meanwhile.
        raise CheckpointError(
            f"The checkpoint of step {step} is damaged: {error}."
        ) from None


# Examples of training that ranges of activations are taken from.
_NUM_CALIBRATED = 256


def write_files(
    experiment: Experiment, model: tfgpipe.PipelinedModel, folder: Path
) -> None:
    """Writes a model without its pipeline, and in 8 bits, and compares the two.

    A model that was trained for 8 bits has the ranges of its activations. Those of any
    other whose inputs are one array of floats are taken from training examples.

    Args:
        experiment: The experiment that was trained.
        model: Its model, trained.
        folder: The run's; files are written to `export` in it.
    """
    target = run_dir.ensure_writable(folder / "export")
    for left in target.glob(".export-*"):  # Of a process that was killed.
        store.discard(left)
    print(f"\nExporting to {target}.", flush=True)
    plain = experiment.for_inference(plain_copy(model))
    plain.save(target / "model.keras")
    plain.export(target / "saved_model", format="tf_saved_model", verbose=False)
    _write_safetensors(plain, target / "model.safetensors")

    int8 = target / "model.tflite"
    quantizes = experiment.precision.quantizes
    examples = None if quantizes else calibration_examples(experiment)
    if not quantizes and examples is None:
        print(
            "No int8 file: the model is not quantized. Train it with "
            "--set=precision.quantize=8bit."
        )
        return
    try:
        tfgpipe.export_int8(plain, int8, examples)
    except (RuntimeError, ValueError) as error:
        print(f"No int8 file. {error}")
        return
    compared = quantization.compare(plain, int8, experiment.batches("validation"))
    size = (target / "model.keras").stat().st_size
    text = (
        f"The int8 file, {readable_bytes(int8.stat().st_size)} beside "
        f"{readable_bytes(size)} of model.keras, on the validation split:\n{compared}"
    )
    (target / "int8.txt").write_text(f"{text}\n", encoding="utf-8")
    print(f"\n{text}", flush=True)


def _write_safetensors(plain: keras.Model, path: Path) -> None:
    """Writes the weights by the names of checkpoints, for other frameworks to read."""
    if not importlib.util.find_spec("safetensors"):
        print("No model.safetensors: `pip install safetensors` brings it.")
        return
    from safetensors.numpy import save_file

    named = variable_names.weights(plain).items()
    arrays = {
        name: np.ascontiguousarray(keras.ops.convert_to_numpy(v)) for name, v in named
    }
    save_file(arrays, path, metadata={"format": "tf"})


def plain_copy(model: tfgpipe.PipelinedModel) -> keras.Model:
    """Returns a model without its pipeline, of averaged weights if there are."""
    with variable_names.ema_weights(model):
        return quantization.plain_copy(model)


def calibration_examples(experiment: Experiment) -> np.ndarray | None:
    """Returns inputs of training, None where they are not one array of floats."""
    found: list[np.ndarray] = []
    for inputs, *_ in experiment.batches("train").as_numpy_iterator():
        is_array = isinstance(inputs, np.ndarray)
        if not is_array or not np.issubdtype(inputs.dtype, np.floating):
            return None
        found.append(inputs)
        if sum(map(len, found)) >= _NUM_CALIBRATED:
            break
    return np.concatenate(found)[:_NUM_CALIBRATED]
