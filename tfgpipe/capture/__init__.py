"""Capture of a Keras model as an IR of calls and values, and its interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.capture import dtype_policies as dtype_policies
    from tfgpipe.capture import input_checks as input_checks
    from tfgpipe.capture import source_model as source_model
    from tfgpipe.capture import tracer as tracer
    from tfgpipe.capture.interpreter import Interpreter as Interpreter
    from tfgpipe.capture.interpreter import TensorKey as TensorKey
    from tfgpipe.capture.interpreter import layer_variables as layer_variables
    from tfgpipe.capture.ir import Call as Call
    from tfgpipe.capture.ir import CallGraph as CallGraph
    from tfgpipe.capture.ir import Segment as Segment
    from tfgpipe.capture.ir import Value as Value
    from tfgpipe.capture.scope import Accumulator as Accumulator
    from tfgpipe.capture.scope import TracingScope as TracingScope
    from tfgpipe.capture.scope import check_assignments as check_assignments
    from tfgpipe.capture.scope import is_differentiable as is_differentiable
    from tfgpipe.capture.scope import stack_losses as stack_losses

__all__, __getattr__, __dir__ = lazy_exports(__name__)
