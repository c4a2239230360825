"""How fast an experiment trains here and could, and a step on zeros to see it fits."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

import tfgpipe
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.hyperparams import HyperparameterError

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


def benchmark(experiment: Experiment, model: tfgpipe.PipelinedModel) -> str:
    """Returns the time of a step, the rate of training, and the bubble.

    Args:
        experiment: The experiment to train, on its own data, for a few steps.
        model: Its model, which is trained.
    """
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
        f"speed       {experiment.tokens_per_step / median:8,.0f} {unit}s a second",
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
    return "\n".join(lines)


def tune(experiment: Experiment, model: tfgpipe.PipelinedModel) -> str:
    """Tries settings of the pipeline, and returns these, and flags for the fastest.

    Args:
        experiment: The experiment, whose devices are those for `num_stages`.
        model: Its model, which stays as it is.

    Raises:
        HyperparameterError: If there are replicas.
    """
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
    return f"{tuned}\n{flags}"


def verify(experiment: Experiment, model: tfgpipe.PipelinedModel) -> str:
    """Returns the comparison of a training step with that of plain Keras.

    Args:
        experiment: The experiment, of whose data the first mini-batch is taken.
        model: Its model, which stays as it is.
    """
    return str(tfgpipe.verify(model, next(iter(experiment.batches("train")))))


def step_on_zeros(experiment: Experiment, model: tfgpipe.PipelinedModel) -> str:
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
