"""The HLO module of a traced function, which any of XLA's compilers takes.

It is the graph after tf2xla and before any optimization. TensorFlow lowers it as for a
GPU, for which none has to be there; or, if it captures variables, for the device that
they are on, which is one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfgpipe._compat import functions

# TensorFlow writes `op (why){{function_node outer}}{{node name}}` of each operation
# that tf2xla lacks, and `{{...}}` in the reason as well.
_UNSUPPORTED = re.compile(
    r"(\w+) \([^{}]*(?:\{\{[^{}]*\}\}[^{}]*)*\)(?:\{\{function_node [^}]+\}\})*"
    r"\{\{node ([^}]+)\}\}"
)


@dataclasses.dataclass(frozen=True)
class UnsupportedOp:
    """An operation that XLA does not have.

    Attributes:
        op: Its type.
        node: Its name in the graph.
    """

    op: str
    node: str

    @property
    def layer(self) -> str:
        """The layer that it is of: the scope in which it was made."""
        return self.node.rpartition("/")[0]


class UnsupportedOpError(ValueError):
    """A function has operations that XLA does not compile.

    Attributes:
        operations: The operations found.
    """

    def __init__(self, operations: tuple[UnsupportedOp, ...]) -> None:
        self.operations = operations
        found = dict.fromkeys(
            f"{each.op} of layer '{each.layer}'"
            if each.layer
            else f"{each.op} (node '{each.node}')"
            for each in operations
        )
        super().__init__(
            f"XLA does not compile {', '.join(found)}. A layer that TPUs or compiled "
            "functions are to run needs another way to compute this."
        )


def hlo(function: Callable[..., Any], *args: tf.Tensor | tf.TensorSpec) -> bytes:
    """Returns the serialized `HloModuleProto` of a function.

    Args:
        function: One of TensorFlow: concrete, of a stage, or traced now.
        *args: Its arguments: shapes and types, or tensors if some values are needed to
            trace it. All dimensions are known.

    Raises:
        UnsupportedOpError: If it has operations that XLA lacks.
        ValueError: If a dimension is not known, or XLA cannot compile it otherwise.
    """
    specs = [x if isinstance(x, tf.TensorSpec) else _spec(x) for x in args]
    for position, spec in enumerate(specs):
        if not spec.shape.is_fully_defined():
            raise ValueError(
                "XLA compiles for known shapes. Received an argument "
                f"{position} of shape {spec.shape}."
            )

    def call(*tensors: tf.Tensor) -> Any:
        return function(*tensors)

    compiled = tf.function(call, autograph=False, jit_compile=True)
    given = args if all(isinstance(x, tf.Tensor) for x in args) else specs
    try:
        captured = functions.captures(compiled.get_concrete_function(*given).graph)
        devices = {x.device for x in captured.values() if x.dtype == tf.resource}
        generate = compiled.experimental_get_compiler_ir(*given)
        if not devices:
            return generate(stage="hlo_serialized", platform_name="GPU")
        # TensorFlow reads variables when it lowers, on the device of the scope alone.
        with tf.device(min(devices)):
            return generate(stage="hlo_serialized")
    except (ValueError, tf.errors.OpError) as error:
        text = str(error)
        found = tuple(UnsupportedOp(*each) for each in _UNSUPPORTED.findall(text))
        if found:
            raise UnsupportedOpError(found) from None
        raise ValueError(f"XLA cannot compile this: {_reason(text)}") from error


def _spec(tensor: Any) -> tf.TensorSpec:
    """Returns the shape and type of a tensor or a variable."""
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _reason(text: str) -> str:
    """Returns the first line of an error that says something."""
    text = text.removeprefix("Failed getting HLO text: ").strip("'\" ")
    return next((line for line in text.splitlines() if line.strip()), text)
