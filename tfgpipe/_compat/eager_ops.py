"""Private TensorFlow API: an operation of a traced graph, executed by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, execute


def run_operation(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Runs an operation eagerly, on whatever inputs and on the current device.

    `tf.raw_ops` lacks some operations, and names the arguments of others otherwise
    than graphs do.
    """
    if op.type == "Const":
        return [tf.constant(tf.make_ndarray(op.get_attr("value")))]
    attributes: list[Any] = []
    for attribute in op.op_def.attr:
        value = op.get_attr(attribute.name)
        attributes += [attribute.name, _eager_attribute(value)]
    return list(
        execute.execute(
            op.type,
            len(op.outputs),
            list(inputs),
            tuple(attributes),
            context.context(),
        )
    )


def _eager_attribute(value: Any) -> Any:
    """Returns an attribute as eager operations take it."""
    if isinstance(value, list):
        return list(map(_eager_attribute, value))
    if isinstance(value, tf.DType):
        return value.as_datatype_enum
    if hasattr(value, "unknown_rank"):
        return None if value.unknown_rank else [axis.size for axis in value.dim]
    return value
