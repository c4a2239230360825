"""The loss on the validation split, beside the losses that it should beat."""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from params.experiment import Experiment


def evaluate(
    experiment: Experiment, model: keras.Model, dataset: tf.data.Dataset
) -> dict[str, float]:
    """Returns losses on the validation dataset, that of `"model"` first, in nats.

    Raises:
        FloatingPointError: If the model's loss is not finite.
    """
    loss = model.evaluate(dataset, verbose=0, return_dict=True)["loss"]
    if not math.isfinite(loss):
        raise FloatingPointError(f"the validation loss is {loss}")
    return {"model": loss, **experiment.baselines()}


def comparison(losses: dict[str, float], *, unit: str) -> str:
    """Returns losses in nats as a table, in bits as well.

    >>> print(comparison({"model": 1.5, "bigram": 2.5}, unit="byte"))
    validation   nats/byte   bits/byte
    model           1.5000      2.1640
    bigram          2.5000      3.6067
    """
    columns = (f"nats/{unit}", f"bits/{unit}")
    lines = [f"{'validation':10}  {columns[0]:>10}  {columns[1]:>10}"]
    for name, nats in losses.items():
        lines.append(f"{name:10}  {nats:10.4f}  {nats / math.log(2):10.4f}")
    return "\n".join(lines)
