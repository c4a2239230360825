"""What a trained model measures on the validation split, and makes of new data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfgpipe_trainer import evaluators, hooks, run_dir
from tfgpipe_trainer.checkpoint import variable_names
from tfgpipe_trainer.errors import DivergedError
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.hyperparams import HyperparameterError


def evaluate(model: keras.Model, dataset: tf.data.Dataset) -> dict[str, float]:
    """Returns the loss, in nats, and all metrics; of averaged weights if there are.

    Raises:
        DivergedError: If the loss is not finite.
        HyperparameterError: If a metric is more than a number.
    """
    with variable_names.ema_weights(model):
        measured = model.evaluate(dataset, verbose=0, return_dict=True)
    if not math.isfinite(measured["loss"]):
        raise DivergedError(f"the validation loss is {measured['loss']}")
    first = {"loss": measured["loss"], **measured}
    for name, value in first.items():
        if np.ndim(value):
            raise HyperparameterError(
                f"metrics: expected metrics whose results are one number each; "
                f"received {name!r}, of shape {np.shape(value)}."
            )
    return {name: float(value) for name, value in first.items()}


def line(measured: Mapping[str, float], part: str = "") -> str:
    """Returns measurements on one line.

    >>> line({"loss": 1.5, "accuracy": 0.75}, "64 of 1,000 examples")
    'validation loss 1.5000, accuracy 0.7500, on 64 of 1,000 examples'
    """
    return f"validation {evaluators.line(measured)}{part and f', on {part}'}"


def validated_part(experiment: Experiment) -> str:
    """Names the part of the validation split that is measured; empty if all is."""
    number = experiment.evaluation.max_batches
    if number is None:
        return ""
    count = number * experiment.training.batch_size
    size = experiment.num_validation_examples()
    if size is None:
        return f"at most {count:,} examples"
    return f"{count:,} of {size:,} examples" if count < size else ""


def show_comparison(
    experiment: Experiment,
    measured: Mapping[str, float],
    baselines: Mapping[str, float],
) -> None:
    """Prints what a model measures beside its baselines."""
    units = hooks.call(experiment, "report_units")
    table = comparison(measured, baselines, unit=experiment.unit, report_units=units)
    part = validated_part(experiment)
    print(f"{table}{part and chr(10) + f'on {part}'}", flush=True)


def comparison(
    measured: Mapping[str, float],
    baselines: Mapping[str, float],
    *,
    unit: str,
    report_units: Mapping[str, float] | None = None,
) -> str:
    """Returns losses in nats as a table, in bits as well, then all else.

    Args:
        measured: The model's loss per unit, and its metrics.
        baselines: Other losses, by name.
        unit: The unit that a loss is a mean over, such as a byte.
        report_units: Number of other units in a unit, by name; losses are shown in
            both.

    >>> print(comparison({"loss": 1.5, "acc": 0.5}, {"bigram": 2.5}, unit="byte"))
    validation   nats/byte   bits/byte
    model           1.5000      2.1640
    bigram          2.5000      3.6067
    acc             0.5000
    >>> print(comparison({"loss": 1.5}, {}, unit="token", report_units={"byte": 3.0}))
    validation  nats/token  bits/token   nats/byte   bits/byte
    model           1.5000      2.1640      0.5000      0.7213
    """
    scales = {
        f"{measure}/{name}": size * count
        for name, count in {unit: 1.0, **(report_units or {})}.items()
        for measure, size in (("nats", 1.0), ("bits", math.log(2)))
    }
    lines = ["  ".join([f"{'validation':10}", *(f"{name:>10}" for name in scales)])]
    for name, nats in {"model": measured["loss"], **baselines}.items():
        values = [f"{nats / scale:10.4f}" for scale in scales.values()]
        lines.append("  ".join([f"{name:10}", *values]))
    for name, value in measured.items():
        if name != "loss":
            lines.append(f"{name:10}  {value:10.4f}")
    return "\n".join(lines)


def decode(experiment: Experiment, model: keras.Model, folder: Path) -> None:
    """Writes what a model makes of validation data, and prints some of it.

    Args:
        experiment: Its experiment.
        model: The model; averages of its weights are used if there are any.
        folder: The run's; files go to `decode` in it.
    """
    target = run_dir.ensure_writable(folder / "decode")
    with variable_names.ema_weights(model):
        shown = experiment.decode(model, target)
    if shown:
        print(f"\n{shown}", flush=True)
    if any(target.iterdir()):
        print(f"\nMore is in {target}.", flush=True)
    else:
        target.rmdir()
