"""A run: from its last checkpoint, if there is one, to its last step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfgpipe
from params.experiment import Experiment
from trainer import hyperparams, picture, run_folder
from trainer.checkpoints import Checkpoints
from trainer.decode import decode
from trainer.errors import StoppedError
from trainer.evaluate import comparison, evaluate, line
from trainer.finiteness import Finiteness
from trainer.keeping import Keeping
from trainer.metrics import Metrics
from trainer.notes import Notes
from trainer.profile import Profile
from trainer.stopping import Stopping
from trainer.warm_start import warm_start
from trainer.watch import Watch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What does not decide how a run goes, as steps to be looked at.

    Attributes:
        name: The name of the experiment.
        evaluates: Whether it evaluates, during the run and after it.
        trace_steps: The first and the last step to time devices in, if any.
        profile_steps: The first and the last step to profile, if any.
    """

    name: str
    evaluates: bool = True
    trace_steps: tuple[int, int] | None = None
    profile_steps: tuple[int, int] | None = None


def train(
    experiment: Experiment,
    model: tfgpipe.PipelinedModel,
    folder: Path,
    checkpoints: Checkpoints,
    stopping: Stopping,
    options: Options,
) -> None:
    """Trains, evaluates, and shows what the model can do.

    Args:
        experiment: What to train.
        model: Its model.
        folder: Where to write what is measured: the run's, which is held.
        checkpoints: Its checkpoints.
        stopping: Whether somebody has asked for the end.
        options: What else to do.

    Raises:
        StoppedError: If somebody has; all that is done is saved.
        CheckpointError: If there are checkpoints and none can be read, or the last
            could not be written.
        DivergedError: If a loss or a gradient is not finite.
    """
    experiment.check()
    team = checkpoints.team
    about = checkpoints.restore()
    first_step = about.step if about else 0
    notes = Notes.read(about.notes) if about else Notes()
    over = notes.is_over(experiment.evaluation.patience)
    run_folder.settle(folder, name=options.name, experiment=experiment)
    training = team.training(
        lambda share: experiment.build_dataset(
            "train", first_step=first_step, share=share
        )
    )
    validation = None
    if options.evaluates:
        # Now, since what is wrong with it should not come up after the training.
        validation = team.validation(experiment.build_dataset("validation"))
    metrics = Metrics(folder, step=first_step, text=hyperparams.to_text(experiment))
    if about:
        print(f"Going on from step {first_step}.", flush=True)
    else:
        warm_start(experiment.warm_start, model)

    def measure(step: int) -> Mapping[str, float]:
        assert validation is not None  # Nobody evaluates without.
        measured = evaluate(model, validation)
        metrics.write_validation(step, measured)
        print(f"\nstep {step}: {line(measured)}", flush=True)
        return measured

    if first_step < experiment.training.num_steps and not over:
        print("Tracing the first step.", flush=True)
        looking = _looking(folder, options, first_step)
        keeping = Keeping(
            experiment,
            checkpoints,
            notes,
            stopping,
            measure if options.evaluates else None,
            first_step=first_step,
        )
        callbacks = [
            Finiteness(
                experiment.training,
                notes,
                first_step=first_step,
                batch=lambda step: _batch(experiment, step),
            ),
            Watch(experiment, metrics, first_step=first_step),
            keeping,
            *looking,
        ]
        try:
            model.fit(training, callbacks=callbacks, shuffle=False, verbose=0)
        finally:
            checkpoints.wait()
        for each in looking:
            print(each.summary(), flush=True)
    checkpoints.check()
    if stopping.agreed:
        stopping.settle()
        raise StoppedError
    stopping.stepping = False
    baselines: Mapping[str, float] = {}
    if validation is not None:
        baselines = _conclude(experiment, model, metrics, validation, checkpoints.step)
    picture.draw(
        folder,
        metrics.read(),
        baselines=baselines,
        title=options.name,
        unit=experiment.unit,
    )
    if options.evaluates and team.hosts.count == 1:
        decode(experiment, model, folder)
    elif options.evaluates:
        print(
            "On one host --mode=decode shows what it can do, and --mode=export "
            "writes its files.",
            flush=True,
        )


def _batch(experiment: Experiment, step: int) -> Any:
    """Returns the batch of a step, which depends on nothing but its number."""
    return next(iter(experiment.build_dataset("train", first_step=step - 1)))


def _looking(folder: Path, options: Options, first_step: int) -> list[Any]:
    """Returns callbacks that time devices, or profile, in some steps."""
    looking: list[Any] = []
    if options.trace_steps is not None:
        looking.append(tfgpipe.TimelineCallback(folder, steps=options.trace_steps))
    if options.profile_steps is not None:
        looking.append(Profile(folder, options.profile_steps, first_step=first_step))
    return looking


def _conclude(
    experiment: Experiment,
    model: keras.Model,
    metrics: Metrics,
    validation: tf.data.Dataset,
    step: int,
) -> Mapping[str, float]:
    """Evaluates the trained model, and returns the losses that it should beat."""
    measured, baselines = evaluate(model, validation), experiment.baselines()
    metrics.write_validation(step, {**measured, **baselines}, final=True)
    print(comparison(measured, baselines, unit=experiment.unit), flush=True)
    return baselines
