"""The contract of TFLite's list of operations."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.helpers.versions import MOVED
from tfgpipe._compat import tflite


def test_the_operations_of_a_tflite_file_have_kinds_names_and_types(tmp_path):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Softmax(name="last")]
    )
    model.export(str(tmp_path / "model.tflite"), format="litert", verbose=False)
    interpreter = tf.lite.Interpreter(
        str(tmp_path / "model.tflite"),
        experimental_op_resolver_type=(
            tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        ),
    )
    product, softmax = tflite.lite_operations(interpreter)
    assert "dense" in product.name, MOVED
    assert product == tflite.LiteOp(
        "FULLY_CONNECTED", product.name, frozenset({np.float32})
    ), MOVED
    assert softmax.kind == "SOFTMAX", MOVED
