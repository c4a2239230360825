"""Files of models that compute in 8-bit integers."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.quantization.interpreter import (
    Interpreter,
    batches,
    layer_of,
    without_deprecation,
)
from tfgpipe.quantization.plain import inputs_of, plain_copy
from tfgpipe.quantization.ranges import Range
from tfgpipe.quantization.wrapper import QUANTIZING, FakeQuantize, QuantizeWrapper

SUFFIX = ".tflite"


def export_int8(
    model: keras.Model, path: str | os.PathLike[str], representative: Any = None
) -> None:
    """Writes a model as a LiteRT (TFLite) file that takes and gives 8-bit integers.

    It computes in integers where the model is quantized and TFLite can, and with floats
    elsewhere: `tfgpipe.quantization.compare` tells where. The model stays as it is: a
    copy is written, without pipelines, rebuilt in float32 if it trained in mixed
    precision. Inputs that are integers already, such as an embedding's, stay so.

    The file is written at the end: what was there before a failure is still there.

    Example:

    >>> import tempfile
    >>> layers = [keras.Input((4,)), keras.layers.Dense(2)]
    >>> model = tfgpipe.quantization.apply(keras.Sequential(layers))
    >>> x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    >>> _ = model(x, training=True)  # In place of training: ranges are seen.
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tfgpipe.export_int8(model, f"{folder}/model.tflite")
    ...     compared = tfgpipe.quantization.compare(
    ...         model, f"{folder}/model.tflite", x
    ...     )
    >>> compared.largest_difference <= 1
    True

    Args:
        model: A built Keras model, pipelined or not; best what
            `tfgpipe.quantization.apply` returned, trained.
        path: The file, `*.tflite`.
        representative: Inputs to find ranges with that training has not found: arrays
            in the structure that the model takes, some hundred rows, or a dataset as
            `model.predict` takes it. A model that was not trained for it needs them. In
            one that was they turn layers which would compute with floats, such as
            attention, to integers as well, at some cost in accuracy.

    Raises:
        TypeError: If `model` is no Functional or Sequential model, or a pipeline of it.
        ValueError: If it is not built, no range was seen, Keras has quantized it, or
            its inputs or outputs are not quantized.
        RuntimeError: If TFLite cannot express it.
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ValueError(
            f"A model in 8 bits is written to a file `*{SUFFIX}`. Received '{path}'."
        )
    copy = plain_copy(model)
    inner = keras_internals.inner_layers(copy)
    if representative is None:
        _check_quantizing(copy, inner)
    _check_ranges(inner)
    options: dict[str, Any] = {}
    if representative is not None:
        options["representative_dataset"] = lambda: _samples(copy, representative)
    with replacing(path) as temporary, without_deprecation():
        try:
            copy.export(
                str(temporary),  # Keras 3.13 takes no path here.
                format="litert",
                verbose=False,
                optimizations=[tf.lite.Optimize.DEFAULT],
                inference_input_type=tf.int8,
                inference_output_type=tf.int8,
                # By itself Keras allows TensorFlow's operations too, which the
                # interpreters of devices lack.
                target_spec={"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]},
                **options,
            )
        except Exception as error:
            raise RuntimeError(_failure(copy.name, str(error), inner)) from error
        _check_ends(copy, temporary)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write to, and puts what is there in place of `path` at the end.

    Not if writing fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        temporary = Path(folder) / path.name
        yield temporary
        temporary.replace(path)


def _samples(copy: keras.Model, representative: Any) -> Iterator[Any]:
    """Yields one row after another, as the converter takes them."""
    if isinstance(representative, tf.data.Dataset):
        representative = representative.map(
            lambda *batch: keras.utils.unpack_x_y_sample_weight(batch)[0]
        )
    inputs = keras.tree.flatten(inputs_of(copy))
    for arrays in batches(representative, size=inputs[0].shape[0] or 1):
        row = [np.asarray(x, i.dtype) for x, i in zip(arrays, inputs, strict=True)]
        named = {i.name: x for i, x in zip(inputs, row, strict=True)}
        yield row if len(row) == 1 else named


def _check_quantizing(copy: keras.Model, inner: list[keras.layers.Layer]) -> None:
    if not any(isinstance(layer, QUANTIZING) for layer in inner):
        raise ValueError(
            "Numbers become integers by the ranges that they are in. Received "
            f"'{copy.name}', which was not trained with any, and representative=None. "
            "Train what `tfgpipe.quantization.apply(model)` returns, or pass some "
            "hundred inputs as `representative`."
        )


def _check_ranges(inner: list[keras.layers.Layer]) -> None:
    unseen = [
        layer
        for layer in inner
        if isinstance(layer, QUANTIZING)
        and not int(layer.num_updates)
        and any(_moves(observer) for observer in _of_activations(layer))
    ]
    if unseen:
        names = ", ".join(f"'{layer.name}'" for layer in unseen[:4])
        more = f" and {len(unseen) - 4} more" if len(unseen) > 4 else ""
        raise ValueError(
            "Activations are quantized by ranges that were seen in training. Received "
            f"layers {names}{more}, which have seen none. Train the model, or run "
            "`model(x, training=True)` on a few batches."
        )


def _of_activations(layer: Any) -> list[Any]:
    """Returns what observes activations, which move while a model trains alone."""
    if isinstance(layer, FakeQuantize):
        return [layer.observer]
    assert isinstance(layer, QuantizeWrapper)
    config, inside = layer.config, layer.layer
    observers = [*config.activation_observers(inside).values()]
    return [*observers, config.output_observer(inside)]


def _moves(observer: Any) -> bool:
    fixed = isinstance(observer, Range) and observer.is_fixed
    return observer is not None and not fixed


def _check_ends(copy: keras.Model, path: Path) -> None:
    """Checks that floats have become integers where they go in and come out."""
    names = [x.name for x in keras.tree.flatten(inputs_of(copy))]
    file = Interpreter(path, input_names=names)
    for what, tensors, remedy in (
        (
            "takes",
            file.inputs,
            "Have `tfgpipe.quantization.apply` quantize the inputs, or begin with a "
            "`tfgpipe.quantization.FakeQuantize()`",
        ),
        (
            "gives",
            file.outputs,
            "End with a layer that is quantized, or with a "
            "`tfgpipe.quantization.FakeQuantize()`",
        ),
    ):
        if any(np.issubdtype(tensor.dtype, np.floating) for tensor in tensors):
            raise ValueError(
                f"A file in 8 bits takes and gives integers. Received '{copy.name}', "
                f"which {what} floats that are not quantized. {remedy}; or pass some "
                "hundred inputs as `representative`."
            )


def _failure(model: str, message: str, inner: Collection[keras.layers.Layer]) -> str:
    """Returns what went wrong in the converter: which operation, in which layer."""
    operation = re.search(r"'tfl?\.(\w+)' op", message)
    place = re.search(r'fused\["\w+:", "([^"@]+)@', message)
    by_name = {layer.name: layer for layer in inner}
    name = layer_of(place[1], by_name) if place else ""
    what = f"operation '{operation[1]}'" if operation else "an operation"
    where = f"layer '{name}' of type {type(by_name[name]).__name__}" if name else ""
    lacks = re.search(r"neither a custom op nor a flex op|illegal", message)
    if not (operation or where):
        first = next(filter(None, message.splitlines()), "no message")
        return (
            f"TFLite's converter failed on '{model}': {first} Leave layers out of "
            "quantization with `annotate(layer, QuantizeConfig())` until it does not, "
            "or export it with floats, by `model.export(path, format='litert')`."
        )
    if lacks:
        return (
            f"TFLite has no {what}, which '{model}' has in {where or 'some layer'}. "
            "Replace the layer by one of operations that TFLite has (of a recurrent "
            "layer, `unroll=True`), or leave it to TensorFlow, by `model.export(path)`."
        )
    return (
        f"TFLite's converter failed on {what} of {where or 'some layer'} in '{model}'. "
        "Leave the layer out of quantization, with "
        "`tfgpipe.quantization.annotate(layer, QuantizeConfig())`, or export the model "
        "with floats, by `model.export(path, format='litert')`."
    )
