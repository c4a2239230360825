"""A run: from its last checkpoint, if there is one, to its last step."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfgpipe
from tfgpipe_trainer import (
    devices,
    evaluators,
    hooks,
    hyperparams,
    run_dir,
    validate_data,
)
from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.callbacks import (
    Checkpointing,
    Evaluators,
    Finiteness,
    Logging,
    Profile,
    Timing,
)
from tfgpipe_trainer.checkpoint import variable_names
from tfgpipe_trainer.checkpoint.checkpoints import Checkpoints
from tfgpipe_trainer.checkpoint.run_state import RunState
from tfgpipe_trainer.checkpoint.warm_start import warm_start
from tfgpipe_trainer.errors import StoppedError
from tfgpipe_trainer.evaluate import (
    decode,
    evaluate,
    line,
    show_comparison,
    validated_part,
)
from tfgpipe_trainer.evaluators import Evaluator
from tfgpipe_trainer.experiment import Experiment, output_names
from tfgpipe_trainer.goodput import EVALUATION, Clock
from tfgpipe_trainer.measures import Measures
from tfgpipe_trainer.preemption import Stopping
from tfgpipe_trainer.progress import Progress, draw_losses
from tfgpipe_trainer.writers import Metrics


def build(
    experiment: Experiment,
    scope: contextlib.AbstractContextManager[object] | None = None,
) -> tfgpipe.PipelinedModel:
    """Returns the model with its optimizer's slots made, and prints its stages.

    Args:
        experiment: The experiment of the model.
        scope: The scope to build it in. Defaults to that for the devices here.
    """
    keras.utils.set_random_seed(experiment.seed)
    with scope or devices.scope(experiment.pipelining):
        model = experiment.build_model()
        model.optimizer.build(model.trainable_variables)
    print(tfgpipe.stage_table(model), flush=True)
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options that change no result of a run, such as steps to profile.

    Attributes:
        name: The name of the experiment.
        evaluates: True to evaluate, during the run and after it.
        trace_steps: The first and the last step to time devices in, if any.
        profile_steps: The first and the last step to profile, if any.
        started: The time at which the process has begun, in seconds since 1970.
    """

    name: str
    evaluates: bool = True
    trace_steps: tuple[int, int] | None = None
    profile_steps: tuple[int, int] | None = None
    started: float = dataclasses.field(default_factory=time.time)


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
        experiment: The experiment to train.
        model: Its model.
        folder: The run's folder, which this process has locked.
        checkpoints: Its checkpoints.
        stopping: Requests to end the run.
        options: Evaluation and profiling.

    Raises:
        StoppedError: If somebody has; all that is done is saved.
        CheckpointError: If there are checkpoints and none can be read, or the last
            could not be written.
        DivergedError: If a loss or a gradient is not finite.
    """
    with contextlib.ExitStack() as stack:
        _train(experiment, model, folder, checkpoints, stopping, options, stack)


def _train(
    experiment: Experiment,
    model: tfgpipe.PipelinedModel,
    folder: Path,
    checkpoints: Checkpoints,
    stopping: Stopping,
    options: Options,
    stack: contextlib.ExitStack,
) -> None:
    experiment.check()
    coordinator = checkpoints.coordinator
    about = checkpoints.restore()
    first_step = about.step if about else 0
    run_state = RunState.read(about.notes) if about else RunState()
    over = run_state.is_over(experiment.evaluation.patience)
    run_dir.write_params(folder, name=options.name, experiment=experiment)
    loss = experiment.loss()

    def build(shard: HostShard) -> tf.data.Dataset:
        batches = hooks.call(
            experiment, "batches", "train", first_step=first_step, shard=shard
        )
        validate_data.check_shapes(model, loss, batches.element_spec)
        validate_data.check_loss(model, loss, batches.element_spec)
        return validate_data.whole_labels(loss, batches)

    training = coordinator.training(build)
    validation, part = None, ""
    if options.evaluates:
        # Now, since what is wrong with it should not come up after the training.
        batches = hooks.call(experiment, "batches", "validation")
        validate_data.check_validation(model, loss, batches)
        batches = validate_data.whole_labels(loss, batches)
        validation = coordinator.validation(batches)
        part = validated_part(experiment)
    with run_dir.refuse_unwritable(folder):
        text = hyperparams.to_text(experiment)
        metrics = Metrics(
            folder,
            step=first_step,
            text=text,
            title=options.name,
            writers=experiment.training.writers if coordinator.hosts.is_chief else (),
        )
    stack.callback(metrics.close)
    if about:
        print(f"Going on from step {first_step}.", flush=True)
    else:
        warm_start(experiment.warm_start, model)

    clock = Clock(
        folder,
        started=options.started,
        first_step=first_step,
        num_steps=experiment.training.num_steps,
        minutes=experiment.training.watchdog_minutes,
    )

    if coordinator.hosts.count == 1:
        training = clock.timed(training)

    measured: dict[int, Mapping[str, float]] = {}

    def measure(step: int) -> Mapping[str, float]:
        assert validation is not None  # Nobody evaluates without.
        with clock.use(EVALUATION):
            measured[step] = _measured(model, loss, validation)
        metrics.write_validation(step, measured[step])
        print(f"step {step}: {line(measured[step], part)}", flush=True)
        return measured[step]

    further: Mapping[str, Evaluator] = {}
    if options.evaluates and coordinator.hosts.count == 1:
        further = hooks.call(experiment, "evaluators")

    def evaluate_further(names: Sequence[str], step: int, final: bool = False) -> None:
        with clock.use(EVALUATION), variable_names.ema_weights(model):
            values = evaluators.measured(further, names, model)
        metrics.write(step, values, final=final)
        print(f"step {step}: {evaluators.line(values)}", flush=True)

    if first_step < experiment.training.num_steps and not over:
        profilers = _profilers(folder, options, first_step)
        checkpointing = Checkpointing(
            experiment,
            checkpoints,
            run_state,
            stopping,
            measure if options.evaluates else None,
            clock,
            first_step=first_step,
            outputs=output_names(model.unpipelined()),
        )
        with Progress(sys.stdout, seconds=experiment.training.log_seconds) as progress:
            callbacks = [
                Finiteness(
                    experiment.training,
                    run_state,
                    first_step=first_step,
                    batch=lambda step: _batch(experiment, step),
                ),
                Logging(
                    experiment,
                    metrics,
                    progress,
                    run_state,
                    Measures(experiment, model),
                    first_step=first_step,
                ),
                checkpointing,
                Evaluators(evaluate_further, further, first_step=first_step),
                *profilers,
                Timing(clock, first_step=first_step),
            ]
            failed = validate_data.explained(
                model, loss, lambda: [_batch(experiment, checkpointing.step)]
            )
            try:
                with failed, clock.watched():
                    model.fit(training, callbacks=callbacks, shuffle=False, verbose=0)
            finally:
                checkpoints.wait()
        if not model.stop_training:  # As `Checkpointing` ends a run.
            raise hyperparams.HyperparameterError(
                "examples: expected a batch for each of training.num_steps="
                f"{experiment.training.num_steps}; received fewer."
            )
        for each in profilers:
            print(each.summary(), flush=True)
        print(f"\n{clock}", flush=True)
    checkpoints.check()
    if stopping.all_hosts_stop:
        stopping.settle()
        raise StoppedError
    stopping.stepping = False
    baselines: Mapping[str, float] = {}
    if validation is not None:
        step = checkpoints.step
        last = measured.get(step) or _measured(model, loss, validation)
        baselines = hooks.call(experiment, "baselines")
        metrics.write_validation(step, {**baselines, **last}, final=True)
        show_comparison(experiment, last, baselines)
    if further:
        evaluate_further([*further], checkpoints.step, final=True)
    draw_losses(
        folder,
        metrics.read(),
        baselines=baselines,
        title=options.name,
        unit=experiment.unit,
    )
    if options.evaluates and coordinator.hosts.count == 1:
        decode(experiment, model, folder)
    elif options.evaluates:
        print(
            "On one host --mode=decode shows what it can do, and --mode=export "
            "writes its files.",
            flush=True,
        )


def _measured(
    model: tfgpipe.PipelinedModel, loss: Any, validation: tf.data.Dataset
) -> Mapping[str, float]:
    """Evaluates a model; an error that labels are the cause of says so."""
    with validate_data.explained(model, loss, lambda: validation):
        return evaluate(model, validation)


def _batch(experiment: Experiment, step: int) -> Any:
    """Returns the batch of a step, which depends on nothing but its number."""
    return next(iter(experiment.batches("train", first_step=step - 1)))


def _profilers(folder: Path, options: Options, first_step: int) -> list[Any]:
    """Returns callbacks that time devices, or profile, in some steps."""
    profilers: list[Any] = []
    if options.trace_steps is not None:
        profilers.append(
            tfgpipe.TimelineCallback(
                folder, steps=options.trace_steps, first_step=first_step
            )
        )
    if options.profile_steps is not None:
        profilers.append(Profile(folder, options.profile_steps, first_step=first_step))
    return profilers
