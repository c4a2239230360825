"""What each mode does once TensorFlow has started."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

import tfgpipe
from tfgpipe_trainer import batches, benchmark, devices, evaluators, hooks, run_dir
from tfgpipe_trainer.checkpoint import store, variable_names
from tfgpipe_trainer.checkpoint.checkpoints import Checkpoints, load, newest_whole
from tfgpipe_trainer.errors import CheckpointError
from tfgpipe_trainer.evaluate import decode, evaluate, evaluate_each, show_comparison
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.export import export
from tfgpipe_trainer.flags import Flags
from tfgpipe_trainer.hosts import ALONE, Coordinator, Hosts
from tfgpipe_trainer.preemption import Stopping
from tfgpipe_trainer.train import Options, build, print_plan, show_mesh, train


def run(
    flags: Flags, experiment: Experiment, stopping: Stopping, hosts: Hosts = ALONE
) -> None:
    """Builds the model of an experiment, and does with it what flags say.

    Raises:
        HyperparameterError: If data turns out to be wrong while it is read.
        MemoryError: If there is too little memory.
    """
    try:
        _run(flags, experiment, stopping, hosts)
    except tf.errors.OpError as error:
        # What is raised inside a dataset comes out as an error of TensorFlow.
        found = batches.record_error(error)
        if found is not None:
            raise found from None
        is_full = isinstance(error, tf.errors.ResourceExhaustedError)
        if is_full and not store.is_disk_full(error):
            raise MemoryError(error.message) from error
        raise


def _run(
    flags: Flags, experiment: Experiment, stopping: Stopping, hosts: Hosts
) -> None:
    folder = Path(flags.logdir)
    scope = devices.scope(
        experiment.pipelining, hosts=hosts, tpu=flags.tpu, tpu_zone=flags.tpu_zone
    )
    model = build(experiment, scope)
    stopping.take_signals()
    if flags.smoke_test:
        print_plan(experiment, model)
        print(benchmark.step_on_zeros(experiment, model), flush=True)
    elif flags.mode == "inspect":
        show_mesh(model, folder if flags.logdir else None)
        print_plan(experiment, model)
        if flags.target:
            batch = experiment.batches("train").element_spec
            report = tfgpipe.dry_run(model, batch=batch, platform=flags.target)
            print(f"\n{report}", flush=True)
    elif flags.mode == "benchmark":
        print(benchmark.benchmark(experiment, model), flush=True)
    elif flags.mode == "tune":
        print(benchmark.tune(experiment, model), flush=True)
    elif flags.mode == "verify":
        print(benchmark.verify(experiment, model), flush=True)
    elif flags.watch:
        evaluate_each(experiment, model, folder)
    elif flags.mode in ("train", "train_and_eval"):
        options = Options(
            name=flags.params,
            evaluates=flags.mode == "train_and_eval",
            trace_steps=flags.trace_steps,
            profile_steps=flags.profile_steps,
            started=flags.started,
        )
        place = run_dir.checkpoints(folder)
        saved = Checkpoints(
            place, model, experiment.checkpoint, Coordinator(model, hosts)
        )
        with hosts.writing(folder) as own:
            train(experiment, model, own, saved, stopping, options)
        if experiment.training.export and hosts.count == 1:
            export(experiment, model, folder)
    else:
        _with_checkpoint(flags, experiment, model, folder, stopping)


def _with_checkpoint(
    flags: Flags,
    experiment: Experiment,
    model: tfgpipe.PipelinedModel,
    folder: Path,
    stopping: Stopping,
) -> None:
    """Runs a mode on one checkpoint: eval, decode or export."""
    checkpoints = run_dir.checkpoints(folder)
    checkpoint = _chosen(flags.checkpoint, checkpoints)
    load(checkpoint, model)
    print(f"The checkpoint of step {checkpoint.about.step}.", flush=True)
    if flags.mode == "eval":
        measured = evaluate(model, experiment.batches("validation"))
        baselines = hooks.call(experiment, "baselines")
        show_comparison(experiment, measured, baselines)
        further = hooks.call(experiment, "evaluators")
        with variable_names.averaged(model):
            values = evaluators.measured(further, [*further], model)
        if values:
            print(evaluators.line(values), flush=True)
    elif flags.mode == "decode":
        decode(experiment, model, folder)
    else:
        export(experiment, model, folder)


def _chosen(text: str, folder: Path) -> store.Checkpoint:
    """Reads the checkpoint that --checkpoint means.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is damaged.
    """
    newest = newest_whole(folder)
    assert newest is not None  # The folder holds a run.
    best = newest.about.notes["best_step"]
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
        if not store.place(folder, step).exists():
            return _chosen(text, folder)  # A run that goes on has removed it meanwhile.
        raise CheckpointError(
            f"The checkpoint of step {step} is damaged: {error}."
        ) from None
