"""Graph functions that TensorFlow prepares quickly, by private options of calls.

A training step consists of calls of stage functions, and before the first step
TensorFlow visits the called function again and again, once for each call:

* as the call is added to the graph, to infer shapes: a `GraphFunction` declares them;
* in Grappler, TensorFlow's graph optimizer, about ten times. For a stage function that
  pays; the step around it has nothing to optimize, and `without_grappler` skips it;
* to see whether the call can be inlined: a `GraphFunction` is called through a wrapper
  function of one call, which is all that is looked at;
* in XLA's clustering, which looks for variables of a legacy type, unless the call comes
  after one: `clustering_stop` makes one.

Of 48 transformer blocks on 8 stages with 32 microbatches each of these takes seconds to
tens of seconds. Options of calls are kept by thread, and noted in each call where it is
traced; both by private names of TensorFlow alone. (`tf.config.optimizer` has a public
one, which would hold for the user's own functions, too.)
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import gradients_util

_thread_options = threading.local()
_T = TypeVar("_T")


def make(
    function: Callable[..., list[tf.Tensor]],
    specs: Sequence[tf.TensorSpec],
    *,
    name: str,
) -> Any:
    """Returns a function traced for known shapes, which stays a call where called.

    TensorFlow inlines what is not marked `_noinline`; marked, the graph of a step grows
    with the number of actions and not with the number of layers.

    Args:
        function: What to trace.
        specs: Shapes and types of its arguments.
        name: What to call it.
    """

    def named(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return function(*tensors)

    named.__name__ = name
    with tf.init_scope():
        return tf.function(
            named, autograph=False, experimental_attributes={"_noinline": True}
        ).get_concrete_function(*specs)


def trace_graph(build: Callable[[], _T]) -> _T:
    """Returns what a function returns that is run once in a graph of its own.

    The graph is one of `tf.function`, which orders stateful operations and captures
    tensors from outside. The function may return it, and whatever else it finds out.
    """
    found: list[_T] = []
    tf.function(lambda: found.append(build()), autograph=False).get_concrete_function()
    (result,) = found
    return result


def captures(graph: tf.Graph) -> dict[str, tf.Tensor]:
    """Returns by name what a function's graph has captured, as it is outside."""
    return {inner.name: outer for outer, inner in graph.captures}


def forget_trace(node: tf.compat.v1.NodeDef) -> None:
    """Removes from an operation what holds in the graph alone that it was traced in.

    That is the request to sit next to another operation, which a copy of a part of the
    graph may not hold, and the key of its gradient function, which is of no use
    without a tape and unique to each trace.
    """
    node.attr.pop("_class", None)
    node.attr.pop("_gradient_op_type", None)


def output_shapes(node: tf.compat.v1.NodeDef) -> tf.compat.v1.AttrValue:
    """Returns the shapes of an operation's results, if the graph was asked for them."""
    return node.attr["_output_shapes"]


def input_shapes(function: Any) -> tf.compat.v1.AttrValue:
    """Returns the shapes of the arguments of a function in a graph's library."""
    return function.attr["_input_shapes"]


class GraphFunction:
    """A function of known shapes that is called often and never inlined.

    In a graph it stays a call. It is optimized by Grappler even if the graph around
    it is not.

    Args:
        name: What to call it.
        function: The function, traced.
        on_tpu: Whether it is called in a computation for TPUs, where XLA compiles what
            is called into it and nothing is gained by a shell.
    """

    def __init__(self, name: str, function: Any, *, on_tpu: bool = False) -> None:
        self._name = name
        self._function = function
        self._on_tpu = on_tpu
        self._wrappers: dict[tuple[bytes, str], Any] = {}

    @property
    def graph(self) -> tf.Graph:
        """What the function computes."""
        return self._function.graph

    def __call__(
        self, *tensors: tf.Tensor, devices: Sequence[str] = ()
    ) -> list[tf.Tensor]:
        """Calls the function.

        Args:
            *tensors: Its arguments.
            devices: The devices of the shards. Unused: a function on one device runs on
                the current one.
        """
        del devices
        now = context.context().function_call_options
        outside = getattr(_thread_options, "options", None) or now
        if tf.executing_eagerly() or _needs_tape(tensors):
            with _call_with(outside):
                return list(self._function(*tensors))
        config, executor = outside.config_proto_serialized, now.executor_type or ""
        if self._on_tpu:
            return _call(self._function, tensors, self._name, config, executor)
        if (config, executor) not in self._wrappers:
            taken = self._function.inputs[: len(tensors)]  # Captures come after.
            specs = [tf.TensorSpec(x.shape, x.dtype) for x in taken]

            def shell(*args: tf.Tensor) -> list[tf.Tensor]:
                return _call(
                    self._function, args, "program", _single_round(config), executor
                )

            self._wrappers[config, executor] = make(shell, specs, name=self._name)
        called = self._wrappers[config, executor]
        return _call(called, tensors, self._name, _without_passes(config), "")


def optimization_barrier(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors behind an optimization barrier of XLA.

    Otherwise XLA merges a recomputation with the forward that it repeats, and keeps
    the activations. Short integer lists pass, since they may be static shapes.
    TensorFlow's Python has no function of its own for this operation.
    """
    results = list(map(tf.convert_to_tensor, tensors))
    numbers = [i for i, x in enumerate(results) if not _may_be_shape(x)]
    if not numbers:
        return results
    inputs = [results[i] for i in numbers]
    types = tf.compat.v1.AttrValue()
    types.list.type.extend(x.dtype.as_datatype_enum for x in inputs)
    made = tf.compat.v1.get_default_graph().create_op(
        "XlaOptimizationBarrier", inputs, [x.dtype for x in inputs], attrs={"T": types}
    )
    for i, x, behind in zip(numbers, inputs, made.outputs, strict=True):
        behind.set_shape(x.shape)
        results[i] = behind
    return results


def _may_be_shape(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_integer and (tensor.shape.rank or 0) <= 1


@contextlib.contextmanager
def gradient_calls() -> Iterator[None]:
    """Marks calls of a `GraphFunction` inside as part of a gradient.

    A tape may differentiate those; the gradient of other calls is already known.
    """
    before = getattr(_thread_options, "is_gradient", False)
    _thread_options.is_gradient = True
    try:
        yield
    finally:
        _thread_options.is_gradient = before


def clustering_stop() -> tf.Operation | None:
    """Returns an operation at which XLA's clustering stops searching, or None.

    It is an unused variable of the legacy type. The single-threaded executor has none.
    """
    if tf.executing_eagerly() or context.context().function_call_options.executor_type:
        return None
    with tf.device("CPU:0"), tf.control_dependencies(None):
        return tf.raw_ops.VariableV2(shape=[], dtype=tf.float32).op


@contextlib.contextmanager
def grappler_off() -> Iterator[None]:
    """Functions called or traced inside are not optimized by Grappler.

    Functions of a `GraphFunction` are optimized nevertheless.
    """
    options = context.context().function_call_options
    before = getattr(_thread_options, "options", None)
    _thread_options.options = before or options
    lean = _unoptimized_options(options.config_proto_serialized, options.executor_type)
    try:
        # A copy, since TensorFlow changes options in place.
        with _call_with(copy.copy(lean)):
            yield
    finally:
        _thread_options.options = before


@dataclasses.dataclass(frozen=True)
class UnoptimizedFunction:
    """Calls a function, and traces it first if need be, unoptimized."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        with grappler_off():
            return self.function(*args, **kwargs)


def without_grappler(function: Callable[..., Any]) -> UnoptimizedFunction:
    """Returns a function that is called as it was traced, once and for all."""
    return (
        function
        if isinstance(function, UnoptimizedFunction)
        else UnoptimizedFunction(function)
    )


def _call(
    function: Any, tensors: Any, name: str, config: bytes, executor: str
) -> list[tf.Tensor]:
    """Adds a call to the graph that is being built.

    Args:
        function: What to call, traced.
        tensors: Its arguments.
        name: The name of the operation.
        config: How it is optimized.
        executor: What runs it; an empty string leaves it to TensorFlow.
    """
    graph = tf.compat.v1.get_default_graph()
    function.add_to_graph(graph)
    inputs = [*map(tf.convert_to_tensor, tensors), *function.captured_inputs]
    results = tf.nest.flatten(function.structured_outputs)
    attributes = {
        "Tin": tf.compat.v1.AttrValue(),
        "Tout": tf.compat.v1.AttrValue(),
        "f": tf.compat.v1.AttrValue(),
        "config_proto": tf.compat.v1.AttrValue(s=config),
        "executor_type": tf.compat.v1.AttrValue(s=executor.encode()),
        "_disable_call_shape_inference": tf.compat.v1.AttrValue(b=True),
    }
    attributes["Tin"].list.type.extend(x.dtype.as_datatype_enum for x in inputs)
    attributes["Tout"].list.type.extend(x.dtype.as_datatype_enum for x in results)
    attributes["f"].func.name = function.name
    stateful = function.function_def.signature.is_stateful
    call = graph.create_op(
        "StatefulPartitionedCall" if stateful else "PartitionedCall",
        inputs,
        [result.dtype for result in results],
        name=name,
        attrs=attributes,
    )
    for made, known in zip(call.outputs, results, strict=True):
        made.set_shape(known.shape)
    return list(call.outputs)


def _needs_tape(tensors: Sequence[tf.Tensor]) -> bool:
    """Returns whether a tape has to differentiate the call itself.

    That is so for second derivatives: in a gradient any tape, else one of several.
    """
    order = gradients_util.PossibleTapeGradientTypes(list(tensors))
    return order >= (1 if getattr(_thread_options, "is_gradient", False) else 2)


@contextlib.contextmanager
def _call_with(options: Any) -> Iterator[None]:
    before = context.context().function_call_options
    context.context().function_call_options = options
    try:
        yield
    finally:
        context.context().function_call_options = before


@functools.cache
def _single_round(config: bytes) -> bytes:
    """Limits Grappler to one round, unless the user sets the number of rounds.

    The second round, TensorFlow's default, takes long and has not been seen to make a
    stage's programs any faster.
    """
    proto = tf.compat.v1.ConfigProto.FromString(config)
    rewriting = proto.graph_options.rewrite_options
    rewriting.meta_optimizer_iterations = rewriting.meta_optimizer_iterations or 1
    return proto.SerializeToString()


@functools.cache
def _unoptimized_options(config: bytes, executor: str | None) -> Any:
    """Returns options of calls that run as they were traced."""
    proto = tf.compat.v1.ConfigProto.FromString(_without_passes(config))
    return context.FunctionCallOptions(executor, proto)


@functools.cache
def _without_passes(config: bytes) -> bytes:
    proto = tf.compat.v1.ConfigProto.FromString(config)
    proto.graph_options.rewrite_options.disable_meta_optimizer = True
    return proto.SerializeToString()
