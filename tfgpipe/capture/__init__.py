"""Capture of a Keras model as an IR of calls and values, and its interpreter."""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports
from tfgpipe.capture.ir import Call, CallGraph, Segment, Value

if TYPE_CHECKING:
    from tfgpipe.capture import dtype_policies, input_checks, source_model, tracer
    from tfgpipe.capture.interpreter import Interpreter, TensorKey, layer_variables
    from tfgpipe.capture.recording import functional
    from tfgpipe.capture.scope import (
        Accumulator,
        TracingScope,
        is_differentiable,
        stack_losses,
    )

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    submodules="dtype_policies input_checks source_model tracer",
    interpreter="Interpreter TensorKey layer_variables",
    recording="functional",
    scope="Accumulator TracingScope is_differentiable stack_losses",
)
