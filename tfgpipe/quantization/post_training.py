"""Keras' own quantization of a model that is trained already."""

from __future__ import annotations

import warnings
from typing import Literal

import keras

from tfgpipe._compat import keras_internals
from tfgpipe.quantization.plain import plain_copy
from tfgpipe.quantization.wrapper import QUANTIZING


def quantize_after_training(
    model: keras.Model, *, mode: Literal["int8", "int4", "float8"] = "int8"
) -> keras.Model:
    """Returns an unpipelined copy of a model, quantized by Keras' `model.quantize`.

    Keras quantizes `Dense`, `EinsumDense` and `Embedding` layers, and leaves others,
    such as convolutions, in floats. Activations get their ranges anew with each call,
    so it takes no data, and what comes out is a Keras model, not a file.

    Example:

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> copy = tfgpipe.quantization.quantize_after_training(model)
    >>> copy.layers[0].dtype_policy.name, model.layers[0].dtype_policy.name
    ('int8_from_float32', 'float32')

    Args:
        model: A built model, pipelined or not, that is not quantized.
        mode: As of `keras.Model.quantize`.

    Raises:
        TypeError: If it is no Functional or Sequential model, or a pipeline of it.
        ValueError: If it is not built, or is quantized already.
    """
    copy = plain_copy(model)
    inside = [
        x for x in keras_internals.inner_layers(copy) if isinstance(x, QUANTIZING)
    ]
    if inside:
        raise ValueError(
            "Quantization after training is for a model trained without. Received "
            f"'{model.name}' with layer '{inside[0].name}', which quantizes already. "
            "Export it with `tfgpipe.export_int8`, or quantize what it was before."
        )
    with warnings.catch_warnings():
        # For each layer that Keras leaves as it is: the docstring tells which.
        warnings.filterwarnings("ignore", message=r".*`quantize` method")
        copy.quantize(mode)
    return copy
