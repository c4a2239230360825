"""Export of a model to a LiteRT (TFLite) file that computes in 8-bit integers."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import first_names
from tfgpipe.quantization.layers import QuantizeWrapper, quantizing_layers
from tfgpipe.quantization.model_copies import plain_copy
from tfgpipe.quantization.tflite import LiteInterpreter, batches, without_deprecation


def export_int8(
    model: keras.Model, path: str | os.PathLike[str], representative: Any = None
) -> None:
    """Writes a model as a LiteRT (TFLite) file that takes and gives 8-bit integers.

    It computes in integers where the model is quantized and TFLite can, and with floats
    elsewhere: `tfgpipe.quantization.compare` tells where. The model stays as it is: a
    copy is written, without pipelines, rebuilt in float32 if it trained in mixed
    precision. Inputs that are integers already, such as an embedding's, stay so.

    The file is written at the end: after a failure an older one is still there.

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
        representative: Some hundred inputs, by which ranges are found that training has
            not: arrays in the structure that the model takes, or a dataset as
            `model.predict` takes it. A model that was not trained for it needs them. In
            one that was they turn layers which would compute with floats, such as
            attention, to integers as well, at some cost in accuracy.

    Raises:
        TypeError: If `model` is no Functional or Sequential model, or a pipeline of it.
        ValueError: If it is not built, no range was seen, Keras has quantized it,
            its inputs or outputs are not quantized, or `representative` is empty or
            not finite.
        RuntimeError: If TFLite cannot express it.
    """
    path = Path(path)
    if path.suffix != ".tflite":
        raise ValueError(
            f"A model in 8 bits is written to a file `*.tflite`. Received '{path}'."
        )
    copy = plain_copy(model)
    _check_ranges(copy, calibrated=representative is not None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        temporary = Path(folder) / path.name
        _convert(copy, temporary, representative)
        _check_ends(copy, temporary)
        temporary.replace(path)


def _convert(copy: keras.Model, path: Path, representative: Any) -> None:
    """Writes a plain model as a file of 8-bit integers."""
    samples = None
    if representative is not None:
        samples = functools.partial(_samples, copy, representative)
    try:
        with without_deprecation():
            copy.export(
                path,
                format="litert",
                verbose=False,
                optimizations=[tf.lite.Optimize.DEFAULT],
                inference_input_type=tf.int8,
                inference_output_type=tf.int8,
                # By itself Keras allows TensorFlow's operations too, which the
                # interpreters of devices lack.
                target_spec={"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]},
                representative_dataset=samples,
            )
    except _SamplesError:
        raise
    except Exception as error:
        raise RuntimeError(_failure(copy, error)) from error


class _SamplesError(ValueError):
    """No ranges can be found by examples."""


def _samples(copy: keras.Model, representative: Any) -> Iterator[Any]:
    """Yields one example after another, as the converter takes them."""
    expected = "Ranges are found by `representative`, some hundred finite inputs."
    is_empty = True
    if isinstance(representative, tf.data.Dataset):
        representative = representative.map(
            lambda *batch: keras.utils.unpack_x_y_sample_weight(batch)[0]
        )
    inputs = copy.inputs
    for arrays in batches(representative, size=inputs[0].shape[0] or 1):
        named = {
            i.name: np.asarray(x, i.dtype) for i, x in zip(inputs, arrays, strict=True)
        }
        for name, x in named.items():
            if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
                raise _SamplesError(f"{expected} Received NaN or infinity in '{name}'.")
        is_empty = False
        yield named if len(named) > 1 else [*named.values()]
    if is_empty:
        raise _SamplesError(f"{expected} Received none.")


def _check_ranges(copy: keras.Model, *, calibrated: bool) -> None:
    layers = quantizing_layers(copy)
    if not (layers or calibrated):
        raise ValueError(
            "Numbers become integers by the ranges that they are in. Received "
            f"'{copy.name}', which was not trained with any, and representative=None. "
            "Train what `tfgpipe.quantization.apply(model)` returns, or pass some "
            "hundred inputs as `representative`."
        )
    missing = [x.name for x in layers if x.needs_calibration and not int(x.num_updates)]
    if missing:
        raise ValueError(
            "Activations are quantized by ranges that were seen in training. Received "
            f"layers {first_names(missing)}, which have seen none. Train the model, or "
            "run `model(x, training=True)` on a few batches."
        )


def _check_ends(copy: keras.Model, path: Path) -> None:
    """Checks that floats have become integers where they go in and come out."""
    file = LiteInterpreter(path, input_names=[x.name for x in copy.inputs])
    begin = "Have `tfgpipe.quantization.apply` quantize the inputs, or begin"
    end = "End with a layer that is quantized, or"
    for verb, tensors, remedy in (
        ("takes", file.inputs, begin),
        ("gives", file.outputs, end),
    ):
        if any(np.issubdtype(tensor.dtype, np.floating) for tensor in tensors):
            raise ValueError(
                f"A file in 8 bits takes and gives integers. Received '{copy.name}', "
                f"which {verb} floats that are not quantized. {remedy} with a "
                "`tfgpipe.quantization.FakeQuantize()`; or pass some hundred inputs "
                "as `representative`."
            )


def _failure(copy: keras.Model, error: Exception) -> str:
    """Returns the converter's error, and the layers that are most often the cause."""
    suspects = filter(_is_suspect, keras_internals.layers.inner_layers(copy)[1:])
    layers = [getattr(x, "layer", x) for x in suspects]
    names = ", ".join(f"'{x.name}' of type {type(x).__name__}" for x in layers[:4])
    first = (str(error).strip() or "nothing").splitlines()[0]
    return (
        f"TFLite's converter failed on '{copy.name}'. Most often the cause is an "
        "operation that TFLite lacks, in a layer of your own or a recurrent one "
        "without `unroll=True`, or ranges per channel elsewhere than in "
        f"two-dimensional convolutions. Received {names or 'none of these'}. Replace "
        "the layer by one of operations that TFLite has, leave it out of quantization "
        "with `tfgpipe.quantization.annotate(layer, QuantizeConfig())`, or export the "
        "model with floats, by `model.export(path, format='litert')`. The converter "
        f"says: {first}"
    )


def _is_suspect(layer: keras.layers.Layer) -> bool:
    if isinstance(layer, QuantizeWrapper):
        two_dimensional = (keras.layers.Conv2D, keras.layers.SeparableConv2D)
        is_per_channel = any(len(v.shape) > 0 for v in layer.ranges)
        return is_per_channel and not isinstance(layer.layer, two_dimensional)
    if isinstance(layer, keras.layers.RNN):
        return not layer.unroll
    is_library = type(layer).__module__.startswith(("keras.", "tfgpipe."))
    return not is_library or isinstance(layer, keras.layers.Lambda)
