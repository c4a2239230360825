"""A device function that colocates operations with their first placed input.

TensorFlow puts an operation for which nobody names a device on the first device there
is, and sends it its inputs. What Keras' optimizers do with a gradient between the last
microbatch and the update (clipping, unscaling, averaging) is made of such operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfgpipe._util import IdentityMap

_CALL_FUNCTIONS = """
    Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf
    StatelessWhile While
"""
# Operations inside the called functions are placed one by one.
_CALLS = frozenset(_CALL_FUNCTIONS.split())


@contextlib.contextmanager
def colocate_with_inputs() -> Iterator[None]:
    """Colocates operations created inside with their first input that has a device.

    Operations with a device of their own keep it. Eagerly TensorFlow's default holds.
    """
    if tf.executing_eagerly():
        yield
        return
    find = device_finder()

    def device(operation: tf.Operation) -> str:
        if operation.device or operation.type in _CALLS:
            return operation.device
        return next(filter(None, map(find, operation.inputs)), "")

    with tf.compat.v1.get_default_graph().device(device):
        yield


def device_finder() -> Callable[[tf.Tensor], str]:
    """Returns a function that finds the device of a graph's tensor, `""` if unknown.

    A variable's value, which TensorFlow reads where the variable is, and what comes
    from outside the graph have one though their operations name none.
    """
    captured: IdentityMap[tf.Tensor, tf.Tensor] = IdentityMap()

    def find(tensor: tf.Tensor) -> str:
        if tensor.device:
            return tensor.device
        if tensor.op.type == "ReadVariableOp":
            return find(tensor.op.inputs[0])
        if tensor.op.type == "Placeholder" and tensor not in captured:
            captured.update((inner, outer) for outer, inner in tensor.graph.captures)
        return find(captured[tensor]) if tensor in captured else ""

    return find
