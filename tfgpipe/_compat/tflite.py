"""Private TensorFlow Lite API: the operations of a converted model."""

from __future__ import annotations

import tensorflow as tf

from tfgpipe._compat.keras_internals import LiteOp


def lite_operations(interpreter: tf.lite.Interpreter) -> list[LiteOp]:
    """Returns the operations of a TFLite file, in order.

    An interpreter publicly tells tensors alone. It must have no delegates, which put
    operations of their own in place of those in the file.
    """
    tensors = {x["index"]: x for x in interpreter.get_tensor_details()}
    return [
        LiteOp(
            kind=x["op_name"],
            name=next((tensors[i]["name"] for i in made), ""),
            dtypes=frozenset(tensors[i]["dtype"] for i in made),
        )
        for x in interpreter._get_ops_details()
        for made in [[i for i in x["outputs"] if i in tensors]]
    ]
