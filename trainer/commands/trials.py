"""Modes that try a model: inspect, a smoke test, benchmark, tune, verify."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfgpipe
from tfgpipe.report import device_memory, draw_memory
from tfgpipe.schedules import draw
from tfgpipe_trainer import run_dir
from tfgpipe_trainer.commands.job import Job
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.hyperparams import HyperparameterError


def inspect(job: Job) -> None:
    """Prints stages, costs and schedule; with --target as of another device."""
    flags, experiment, model = job.flags, job.experiment, job.model
    _show_mesh(model, job.folder if flags.logdir else None)
    _print_plan(experiment, model)
    if flags.target:
        batch = experiment.batches("train").element_spec
        report = tfgpipe.dry_run(model, batch=batch, platform=flags.target)
        print(f"\n{report}", flush=True)


def smoke_test(job: Job) -> None:
    """Prints the plan, and makes one step on zeros."""
    _print_plan(job.experiment, job.model)
    print(_step_on_zeros(job.experiment, job.model), flush=True)


def _show_mesh(model: tfgpipe.PipelinedModel, folder: Path | None) -> None:
    """Shows which device holds what: as a picture in a folder, or printed.

    Args:
        model: The model, its optimizer built.
        folder: The folder of `mesh.png`, or None to print.
    """
    grid = device_memory(model)
    if folder is None:
        print(f"\n{draw_memory(grid)}", flush=True)
        return
    tfgpipe.plot_mesh(grid, path=run_dir.ensure_writable(folder) / "mesh.png")
    print(f"\nWho holds what is drawn in {folder / 'mesh.png'}.", flush=True)


def _print_plan(experiment: Experiment, model: tfgpipe.PipelinedModel) -> None:
    """Prints the schedule, and what each stage costs."""
    print(f"\n{model.schedule.name}\n{draw(model.schedule)}", flush=True)
    plan = model.plan(batch_size=experiment.training.batch_size)
    print(f"\n{plan}", flush=True)


def _step_on_zeros(experiment: Experiment, model: tfgpipe.PipelinedModel) -> str:
    """Makes a step on a batch of zeros of the real shapes; says how that went.

    Args:
        experiment: The experiment.
        model: Its model.
    """
    spec = experiment.batches("train").element_spec
    size = experiment.training.batch_size

    def zeros(each: tf.TensorSpec) -> Any:
        shape = [size if length is None else length for length in each.shape]
        return tf.zeros(shape, each.dtype)

    batch = tf.nest.map_structure(zeros, spec)
    started = time.perf_counter()
    x, *targets = batch if isinstance(batch, tuple) else (batch,)
    loss = model.train_on_batch(x, *targets, return_dict=True)["loss"]
    seconds = time.perf_counter() - started
    return (
        f"\nA step on zeros: loss {float(loss):.4f}, {seconds:.1f} s with tracing. "
        "Nothing was written."
    )


_WARM_UP = 3
_STEPS = 20
_TIMED = 4


class _Clock(keras.callbacks.Callback):
    """Times steps, from the end of one to the end of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Notes the time; the loss has been waited for."""
        self.ends.append(time.perf_counter())


def benchmark(job: Job) -> None:
    """Prints the time of a step, the rate of training, and the bubble.

    The model is trained for a few steps, on its own data.
    """
    experiment, model = job.experiment, job.model
    dataset = experiment.batches("train")
    clock = _Clock()
    started = time.perf_counter()
    # Endless, as a run of few steps has few batches.
    model.fit(
        dataset.repeat(),
        steps_per_epoch=_WARM_UP + _STEPS,
        callbacks=[clock],
        shuffle=False,
        verbose=0,
    )
    ends = clock.ends[_WARM_UP - 1 :]
    seconds = sorted(b - a for a, b in itertools.pairwise(ends))
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4)
    unit = experiment.unit
    lines = [
        f"first step  {clock.ends[0] - started:8.1f} s, tracing included",
        f"step        {1000 * median:8.1f} ms, the median of {len(seconds)}; half of "
        f"them from {1000 * low:.1f} to {1000 * high:.1f}",
        f"speed       {experiment.units_per_step / median:8,.0f} {unit}s a second",
    ]
    with tempfile.TemporaryDirectory() as folder:
        # One goes before those that are timed.
        timing = tfgpipe.TimelineCallback(folder, steps=(2, _TIMED), first_step=0)
        model.fit(
            dataset.repeat(),
            steps_per_epoch=_TIMED,
            callbacks=[timing],
            shuffle=False,
            verbose=0,
        )
        theory, measured = timing.theory, timing.timeline
        assert theory is not None
        assert measured is not None
    lines.append(
        f"bubble      {100 * measured.bubble:8.1f} %, of a schedule that allows "
        f"{100 * theory.bubble:.1f} %"
    )
    print("\n".join(lines), flush=True)


def tune(job: Job) -> None:
    """Tries settings of the pipeline, and prints these, and flags for the fastest.

    The devices are those for `num_stages`; the model stays as it is.

    Raises:
        HyperparameterError: If there are replicas.
    """
    experiment, model = job.experiment, job.model
    count = experiment.pipelining.num_replicas
    if count > 1:
        raise HyperparameterError(
            "pipelining.num_replicas: expected 1, as settings are tried without "
            f"replicas; received {count}."
        )
    fixed = (
        *("memory_limit", "device_speeds", "transfer_dtype"),
        *("jit_compile", "batch_norm", "added_losses", "offload_optimizer", "dtype"),
    )
    tuned = tfgpipe.tune(
        model,
        next(iter(experiment.batches("train"))),
        schedule=list(tfgpipe.schedules.NAMES),
        **{name: getattr(model.config, name) for name in fixed},
    )
    best = tuned.best.setting.plan
    found = {
        "num_stages": best.settings.num_stages,
        "num_microbatches": best.settings.num_microbatches,
        "schedule": best.settings.schedule.name,
        "remat": best.settings.remat,
        "layers_per_stage": ",".join(map(str, best.calls_per_stage)),
    }
    each = best.settings.num_stages // best.settings.schedule.num_devices
    if each > 1:
        found["stages_per_device"] = each
    flags = " ".join(f"--set=pipelining.{name}={x}" for name, x in found.items())
    print(f"{tuned}\n{flags}", flush=True)


def verify(job: Job) -> None:
    """Prints the comparison of a training step with that of plain Keras."""
    batch = next(iter(job.experiment.batches("train")))
    print(tfgpipe.verify(job.model, batch), flush=True)
