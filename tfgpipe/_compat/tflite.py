"""Private TensorFlow Lite API: the operations of a converted model."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class LiteOp:
    """An operation of a TFLite file.

    Attributes:
        kind: Such as `"CONV_2D"`.
        name: Name of its first result, after the TensorFlow operation it comes from.
        dtypes: NumPy types of its results.
    """

    kind: str
    name: str
    dtypes: frozenset[type]


def lite_operations(interpreter: tf.lite.Interpreter) -> list[LiteOp]:
    """Returns the operations of a TFLite file, in order.

    An interpreter publicly lists tensors alone. It must have no delegates, which
    replace operations in the file by their own.
    """
    tensors = {x["index"]: x for x in interpreter.get_tensor_details()}
    return [
        LiteOp(
            kind=x["op_name"],
            name=next((tensors[i]["name"] for i in results), ""),
            dtypes=frozenset(tensors[i]["dtype"] for i in results),
        )
        for x in interpreter._get_ops_details()
        for results in [[i for i in x["outputs"] if i in tensors]]
    ]
