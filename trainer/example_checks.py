"""Examples beside the network: shapes before the first step, labels after a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from trainer.hyperparams import HyperparameterError


def check_shapes(
    model: tfgpipe.PipelinedModel, loss: keras.losses.Loss, spec: Any
) -> None:
    """Compares what is read with what network and loss take.

    Args:
        model: The network, as a pipeline, built.
        loss: Its loss.
        spec: The `element_spec` of the batches.

    Raises:
        HyperparameterError: If there are no targets, or structure or shapes differ.
    """
    if not isinstance(spec, tuple) or len(spec) < 2:
        raise HyperparameterError(
            f"examples: expected inputs and targets, such as (x, y); received {spec}."
        )
    plain = model.unpipelined()
    _check_inputs(plain, spec[0])
    outputs = plain.outputs
    if _has_labels(loss) and len(outputs) == 1 and isinstance(spec[1], tf.TensorSpec):
        wanted, received = tuple(outputs[0].shape[1:-1]), tuple(spec[1].shape[1:])
        if received not in (wanted, (*wanted, 1)):
            raise HyperparameterError(
                f"examples: expected integer labels of shape {wanted} each, for the "
                f"loss {type(loss).__name__}; received targets of shape {received}. "
                "For one-hot targets define `loss` of the experiment, to return a "
                "keras.losses.CategoricalCrossentropy(from_logits=True)."
            )


def _check_inputs(plain: keras.Model, given: Any) -> None:
    taken = plain.inputs[0] if isinstance(plain, keras.Sequential) else plain.input
    if isinstance(given, dict) and not isinstance(taken, dict):  # Keras goes by names.
        taken = {each.name: each for each in plain.inputs}
        given = {name: each for name, each in given.items() if name in taken}
    keys = [set(each) if isinstance(each, dict) else None for each in (given, taken)]
    leaves = [keras.tree.flatten(each) for each in (given, taken)]
    if keys[0] != keys[1] or len(leaves[0]) != len(leaves[1]):
        raise HyperparameterError(
            f"examples: expected inputs in the structure of the network's, {taken}; "
            f"received {given}."
        )
    for got, wanted in zip(*leaves, strict=True):
        received, shape = got.shape[1:], wanted.shape[1:]
        if not received.is_compatible_with(shape):
            hint = ""
            if received.rank == len(shape) + 1:
                hint = " A `tf.data.Dataset` is of single examples: leave out `batch`."
            raise HyperparameterError(
                f"examples: expected inputs of shape {tuple(shape)} each, as the "
                f"network takes; received {tuple(received)}.{hint}"
            )


def explain(
    model: tfgpipe.PipelinedModel,
    loss: keras.losses.Loss,
    batch: Callable[[], Any],
) -> HyperparameterError | None:
    """Returns what is wrong with a batch that a step has failed on, if it is labels.

    TensorFlow does not say so: what it reports may be another device's operation that
    was cancelled.

    Args:
        model: The network, as a pipeline.
        loss: Its loss.
        batch: Returns the batch.
    """
    outputs = model.unpipelined().outputs
    if not _has_labels(loss) or len(outputs) != 1:
        return None
    _, labels, *_ = batch()
    labels, classes = np.asarray(labels), outputs[0].shape[-1]
    wrong = (labels < 0) | (labels >= classes)
    if loss.ignore_class is not None:
        wrong &= labels != loss.ignore_class
    if not wrong.any():
        return None
    return HyperparameterError(
        f"examples: expected labels from 0 to {classes - 1}, as the network has "
        f"{classes} outputs; received {labels[wrong][0]}. Change the labels, or the "
        "size of the network's last layer."
    )


def _has_labels(loss: keras.losses.Loss) -> bool:
    return isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
