"""Examples beside the network and its loss: before the first step, after a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tfgpipe_trainer.hyperparams import HyperparameterError

# What the check of every batch says, which TensorFlow repeats in an error of its own.
_WHOLE = "expected whole numbers as labels"


def check_validation(
    model: tfgpipe.PipelinedModel, loss: Any, batches: tf.data.Dataset
) -> None:
    """Compares what is validated on, its first batch as well, with network and loss.

    Of training the first step shows it soon enough, and a dataset that shuffles gives
    other batches to whoever comes second.

    Args:
        model: The network, as a pipeline, built.
        loss: Its loss.
        batches: The batches of validation.

    Raises:
        HyperparameterError: If there are none, or they do not fit.
    """
    try:
        check_shapes(model, loss, batches.element_spec)
        batch = next(iter(batches), None)
        if batch is None:
            raise HyperparameterError("examples: expected at least one; received none.")
        wrong = _wrong_labels(model, loss, batch)
        if wrong is not None:
            raise wrong
    except HyperparameterError as error:
        said = str(error).replace("examples: ", 'examples("validation"): ', 1)
        raise HyperparameterError(said) from None


def whole_labels(loss: Any, batches: tf.data.Dataset) -> tf.data.Dataset:
    """Returns batches that end with an error at a label with a fraction.

    TensorFlow casts labels to integers: 0.7 is class 0.
    """
    _, labels, *_ = batches.element_spec
    is_tensor = isinstance(labels, tf.TensorSpec)
    if not (_has_labels(loss) and is_tensor and labels.dtype.is_floating):
        return batches

    def check(inputs: Any, labels: tf.Tensor, *weights: tf.Tensor) -> Any:
        tf.debugging.assert_equal(labels, tf.round(labels), message=_WHOLE)
        return (inputs, labels, *weights)

    return batches.map(check)


def check_shapes(model: tfgpipe.PipelinedModel, loss: Any, spec: Any) -> None:
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
    for each in keras.tree.flatten(spec[1:]):
        _check_numbers(each)
    outputs = plain.outputs
    if _has_labels(loss) and len(outputs) == 1 and isinstance(spec[1], tf.TensorSpec):
        wanted, received = tuple(outputs[0].shape[1:-1]), tuple(spec[1].shape[1:])
        shapes = map(tf.TensorShape, (wanted, (*wanted, 1)))
        if not any(each.is_compatible_with(received) for each in shapes):
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
        _check_numbers(got, wanted.dtype)
        received, shape = got.shape[1:], wanted.shape[1:]
        if not received.is_compatible_with(shape):
            hint = ""
            if received.rank == len(shape) + 1:
                hint = (
                    " Examples come one by one, in a `tf.data.Dataset` as well: leave "
                    "out `batch`."
                )
            raise HyperparameterError(
                f"examples: expected inputs of shape {tuple(shape)} each, as the "
                f"network takes; received {tuple(received)}.{hint}"
            )


def _check_numbers(spec: Any, dtype: str = "bool") -> None:
    """Refuses what is neither a dense array of numbers nor one of a dtype."""
    if isinstance(spec, tf.TensorSpec):
        kind = spec.dtype
        if kind.is_integer or kind.is_floating or kind.name in ("bool", dtype):
            return
    elif not isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec):
        return  # Of None, which Keras leaves out.
    raise HyperparameterError(
        f"examples: expected dense arrays of numbers; received {spec}."
    )


@contextlib.contextmanager
def explained(
    model: tfgpipe.PipelinedModel, loss: Any, batches: Callable[[], Iterable[Any]]
) -> Iterator[None]:
    """Raises an error about labels if these are the cause of one of TensorFlow's.

    TensorFlow does not say so: what it reports may be another device's operation that
    was cancelled.

    Args:
        model: The network, as a pipeline.
        loss: Its loss.
        batches: Returns the batches that the error may be of.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if _WHOLE in str(error):
            raise HyperparameterError(
                f"examples: {_WHOLE}, for the loss {type(loss).__name__}; received "
                "some with fractions."
            ) from error
        if not _has_labels(loss) or len(model.unpipelined().outputs) != 1:
            raise
        for batch in batches():
            found = _wrong_labels(model, loss, batch)
            if found is not None:
                raise found from error
        raise


def _wrong_labels(
    model: tfgpipe.PipelinedModel, loss: Any, batch: Any
) -> HyperparameterError | None:
    """Returns the error about labels of a batch, or None if there is none."""
    outputs = model.unpipelined().outputs
    if not _has_labels(loss) or len(outputs) != 1:
        return None
    _, labels, *_ = batch
    labels, classes = np.asarray(labels), outputs[0].shape[-1]
    fractions = labels % 1 != 0  # So is NaN, of which any remainder is NaN.
    if fractions.any():
        return HyperparameterError(
            f"examples: {_WHOLE}, for the loss {type(loss).__name__}; received "
            f"{labels[fractions][0]}."
        )
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


def check_loss(model: tfgpipe.PipelinedModel, loss: Any, spec: Any) -> None:
    """Checks that a loss depends on outputs, unless layers add another to it.

    Only a function that is not Keras' own may forget them. It is asked about zeros.

    Args:
        model: The network, as a pipeline, built.
        loss: Its loss.
        spec: The `element_spec` of the batches.

    Raises:
        HyperparameterError: If it does not.
    """
    outputs = model.unpipelined().outputs
    sizes = [each.shape[1:] for each in keras.tree.flatten((spec[:2], outputs))]
    is_own = callable(loss) and not type(loss).__module__.startswith("keras.")
    if not is_own or len(outputs) != 1 or any(None in size for size in sizes):
        return
    rows = min(2, keras.tree.flatten(spec)[0].shape[0] or 2)  # One may be squeezed.
    inputs, targets, said = keras.tree.map_structure(
        lambda x: tf.zeros([rows, *x.shape[1:]], x.dtype), (*spec[:2], outputs[0])
    )
    with tf.GradientTape() as tape:
        tape.watch(said)
        value = loss(targets, said)
    if tf.is_tensor(value) and tape.gradient(value, said) is not None:
        return
    model(inputs)
    if not model.losses:  # Those that layers add are known after a call.
        raise HyperparameterError(
            "loss: expected a loss that depends on the network's outputs; received "
            f"{value}, whatever they are, so that no gradient reaches any weight. Is a "
            "`return` missing?"
        )


def _has_labels(loss: Any) -> bool:
    return isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
