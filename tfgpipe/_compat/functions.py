"""Private TensorFlow API: graph functions, and options that make their calls cheap.

A training step consists of calls of stage functions, and before the first step
TensorFlow visits the called function again and again, once for each call:

* as the call is added to the graph, to infer shapes: a `GraphFunction` declares them;
* in Grappler, TensorFlow's graph optimizer, about ten times. For a stage function that
  pays; the step around it has nothing to optimize, and `without_grappler` skips it;
* to see whether the call can be inlined: a `GraphFunction` is called through a wrapper
  function of one call, which is all that is looked at;
* in XLA's clustering, which looks for variables of a legacy type, unless the call comes
  after what may have one: `clustering_stop` looks so, and is nothing.

With 48 transformer blocks on 8 stages and 32 microbatches each of these takes seconds
to tens of seconds. Options of calls are kept by thread, and written into each call when
it is traced; both by private names of TensorFlow alone. (`tf.config.optimizer` is
public, but would hold for the user's own functions, too.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context, record
from tensorflow.python.framework import function_def_to_graph
from tensorflow.python.ops import gradients_util

_STOP = "clustering_stop"
_thread_options = threading.local()
_T = TypeVar("_T")


def trace_function(
    function: Callable[..., list[tf.Tensor]],
    specs: Sequence[tf.TensorSpec],
    *,
    name: str,
    inlined: bool = False,
) -> Any:
    """Returns a function traced for known shapes.

    Args:
        function: The function.
        specs: Shapes and types of its arguments.
        name: Its name.
        inlined: True if TensorFlow is to put its operations in place of its calls. Else
            the graph of a step grows with the number of actions alone, not of layers.
    """

    def named(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return function(*tensors)

    named.__name__ = name
    with tf.init_scope():
        return tf.function(
            named,
            autograph=False,
            experimental_attributes=None if inlined else {"_noinline": True},
        ).get_concrete_function(*specs)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that XLA compiles for the device on which it is called."""
    return tf.function(function, autograph=False, jit_compile=True)


def trace_graph(build: Callable[[], _T]) -> _T:
    """Returns the result of a function that is run once, in a graph of its own.

    The graph is one of `tf.function`, which orders stateful operations and captures
    tensors from outside. The result may be the graph, or anything found in it.
    """
    results: list[_T] = []
    tf.function(
        lambda: results.append(build()), autograph=False
    ).get_concrete_function()
    return results[0]


def captures(graph: tf.Graph) -> dict[str, tf.Tensor]:
    """Returns the outer tensors that a function's graph captures, by inner name."""
    return {inner.name: outer for outer, inner in graph.captures}


def forget_trace(node: tf.compat.v1.NodeDef) -> None:
    """Removes the attributes of an operation that hold in its own graph alone.

    These are the colocation with another operation, which a subgraph may lack, and the
    key of its gradient function, which is useless without a tape and unique to each
    trace.
    """
    node.attr.pop("_class", None)
    node.attr.pop("_gradient_op_type", None)


def output_shapes(node: tf.compat.v1.NodeDef) -> tf.compat.v1.AttrValue:
    """Returns the shapes of results, which `as_graph_def(add_shapes=True)` writes."""
    return node.attr["_output_shapes"]


def input_shapes(function: Any) -> tf.compat.v1.AttrValue:
    """Returns the shapes of the arguments of a function in a graph's library."""
    return function.attr["_input_shapes"]


def graphs_of_functions(library: Any) -> dict[str, tf.Graph]:
    """Returns the functions of a graph's library as graphs of their own, by name.

    Each has `inputs` and `outputs`, tensors of it, and the functions that it calls.
    """
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(tf.compat.v1.GraphDef(library=library), name="")
        return {
            each.signature.name: function_def_to_graph.function_def_to_graph(
                each, include_library_functions=True
            )
            for each in library.function
        }


class GraphFunction:
    """A function of known shapes that is called often, and inlined only when asked to.

    It is optimized by Grappler even if the graph around it is not.

    Args:
        name: The name of its calls.
        function: The function, traced.
    """

    def __init__(self, name: str, function: Any) -> None:
        self._name = name
        self._function = function
        self._wrappers: dict[tuple[bytes, str], Any] = {}

    @property
    def graph(self) -> tf.Graph:
        """The graph of the function."""
        return self._function.graph

    def __call__(
        self, *tensors: tf.Tensor, devices: Sequence[str] = ()
    ) -> list[tf.Tensor]:
        """Calls the function, on the current device whatever its shards' are."""
        del devices
        current = context.context().function_call_options
        outside = getattr(_thread_options, "options", None) or current
        if tf.executing_eagerly() or _needs_tape(tensors):
            with _call_with(outside):
                return list(self._function(*tensors))
        if getattr(_thread_options, "inlines", False):
            config = current.config_proto_serialized
            return _call(self._inlined, tensors, self._name, config, "")
        config, executor = outside.config_proto_serialized, current.executor_type or ""
        if (config, executor) not in self._wrappers:
            arguments = self._function.inputs[: len(tensors)]  # Captures come after.
            specs = [tf.TensorSpec(x.shape, x.dtype) for x in arguments]

            def call(*args: tf.Tensor) -> list[tf.Tensor]:
                return _call(
                    self._function, args, "function", _single_round(config), executor
                )

            self._wrappers[config, executor] = trace_function(
                call, specs, name=self._name
            )
        wrapper = self._wrappers[config, executor]
        return _call(wrapper, tensors, self._name, _without_passes(config), "")

    @functools.cached_property
    def _inlined(self) -> Any:
        """The same function, as TensorFlow inlines it."""
        inner = self._function.inputs
        captured = self._function.captured_inputs
        arguments = inner[: len(inner) - len(captured)]
        # A tape that has seen another call of it has added outputs for its gradient.
        count = len(tf.nest.flatten(self._function.structured_outputs))
        outputs = [x.name for x in self._function.outputs[:count]]
        definition = self.graph.as_graph_def()

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            # As a call would, all waits for all arguments: what is recomputed is not
            # computed early, nor taken from where it was computed before. They come to
            # this device first, since a wait for another device is a message more.
            here = list(map(tf.identity, (*tensors, *captured)))
            with tf.control_dependencies([tf.group(*here)]):
                given = list(map(tf.identity, here))
            return tf.graph_util.import_graph_def(
                definition,
                input_map={x.name: y for x, y in zip(inner, given, strict=True)},
                return_elements=outputs,
                name="",
            )

        specs = [tf.TensorSpec(x.shape, x.dtype) for x in arguments]
        return trace_function(run, specs, name=self._name, inlined=True)


def may_be_recorded() -> bool:
    """Returns whether a tape may record operations for a gradient now."""
    return record.could_possibly_record()


@contextlib.contextmanager
def gradient_calls() -> Iterator[None]:
    """Marks calls of a `GraphFunction` inside as part of a gradient.

    A single tape may differentiate those; the gradient of other calls is given by hand.
    """
    before = getattr(_thread_options, "is_gradient", False)
    _thread_options.is_gradient = True
    try:
        yield
    finally:
        _thread_options.is_gradient = before


@contextlib.contextmanager
def inlined_calls() -> Iterator[None]:
    """Calls of a `GraphFunction` inside are inlined when the graph around them runs.

    A call costs as much as some tens of operations. Grappler then optimizes that graph:
    also within `grappler_off`, whose other functions have been traced without.
    """
    before = getattr(_thread_options, "inlines", False)
    outside = getattr(_thread_options, "options", None)
    if outside is not None:
        context.context().function_call_options = outside
        _thread_options.options = None
    _thread_options.inlines = True
    try:
        yield
    finally:
        _thread_options.inlines = before


def clustering_stop() -> tf.Operation | None:
    """Returns an operation at which XLA's clustering stops searching, or None.

    The search is for variables of TensorFlow 1, in every function that is called, and
    leaves out all that comes after an operation that may have one. This one does
    nothing, but has an attribute that names an operation on such variables. Grappler
    would remove a `NoOp`, and leaves a `ControlTrigger`.
    """
    if tf.executing_eagerly():
        return None
    stop = tf.compat.v1.AttrValue()
    stop.func.name = "RefIdentity"
    graph = tf.compat.v1.get_default_graph()
    with tf.device("CPU:0"), tf.control_dependencies(None):
        return graph.create_op(
            "ControlTrigger", [], [], name=_STOP, attrs={f"_{_STOP}": stop}
        )


@contextlib.contextmanager
def grappler_off() -> Iterator[None]:
    """Functions called or traced inside are not optimized by Grappler.

    Functions of a `GraphFunction` are optimized nevertheless.
    """
    options = context.context().function_call_options
    before = getattr(_thread_options, "options", None)
    _thread_options.options = before or options
    config = _without_passes(options.config_proto_serialized)
    # New ones each time, since TensorFlow changes options in place.
    off = context.FunctionCallOptions(
        options.executor_type, tf.compat.v1.ConfigProto.FromString(config)
    )
    try:
        with _call_with(off):
            yield
    finally:
        _thread_options.options = before


@dataclasses.dataclass
class UnoptimizedFunction:
    """Calls a function, and traces it first if need be, without Grappler.

    Attributes:
        function: The function.
        scope: Makes a context in which it is called.
        inlines: True if it was traced with `inlined_calls`, so Grappler optimizes it.
    """

    function: Callable[..., Any]
    scope: Callable[[], contextlib.AbstractContextManager[Any]]
    inlines: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        if self.inlines:
            with self.scope():
                return self.function(*args, **kwargs)
        with grappler_off(), self.scope():
            results = self.function(*args, **kwargs)
            self.inlines = _thread_options.options is None
        return results


def without_grappler(
    function: Callable[..., Any],
    scope: Callable[
        [], contextlib.AbstractContextManager[Any]
    ] = contextlib.nullcontext,
) -> UnoptimizedFunction:
    """Returns a function that is called as it was traced; wraps none twice."""
    if isinstance(function, UnoptimizedFunction):
        return function
    return UnoptimizedFunction(function, scope)


def _call(
    function: Any, tensors: Any, name: str, config: bytes, executor: str
) -> list[tf.Tensor]:
    """Adds a call to the graph that is being built.

    Optimized as a serialized `ConfigProto` says; an empty type of executor is
    TensorFlow's choice.
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
    for output, result in zip(call.outputs, results, strict=True):
        output.set_shape(result.shape)
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

    The second round, TensorFlow's default, takes long and made no stage function any
    faster.
    """
    proto = tf.compat.v1.ConfigProto.FromString(config)
    rewriting = proto.graph_options.rewrite_options
    rewriting.meta_optimizer_iterations = rewriting.meta_optimizer_iterations or 1
    return proto.SerializeToString()


@functools.cache
def _without_passes(config: bytes) -> bytes:
    proto = tf.compat.v1.ConfigProto.FromString(config)
    proto.graph_options.rewrite_options.disable_meta_optimizer = True
    return proto.SerializeToString()
