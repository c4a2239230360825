"""Functions cut from a traced stage, each built once and called every microbatch.

A program takes the tensors it needs by name and returns the ones it makes by name, so
the pipeline keeps, for each stage and microbatch, one small dictionary of tensors and
need not know which of them a cut turned out to need.

Programs stay *calls* in the graph of a training step (`_noinline`), so that this graph
grows with the number of actions and not with the number of layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfgpipe import cut
from tfgpipe.trace import Gradient, Trace

Values = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Forward:
    """The forward program of a stage.

    Attributes:
        feeds: Names of the tensors it takes.
        fetches: Names of the tensors it makes.
        function: The function itself, `(*rows, *feeds) -> fetches`, where `rows` is
            the number of rows of the microbatch if that may be zero, else nothing.
    """

    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    function: Callable[..., Sequence[tf.Tensor]]

    def __call__(self, values: Mapping[str, tf.Tensor], *rows: tf.Tensor) -> Values:
        """Runs the program on the tensors in `values` and returns what it made."""
        feeds = [values[feed] for feed in self.feeds]
        return dict(zip(self.fetches, self.function(*rows, *feeds), strict=True))


@dataclasses.dataclass(frozen=True)
class Backward:
    """The backward program of a stage.

    Attributes:
        feeds: Names of the tensors it takes.
        num_inputs: Number of inputs of the stage that have a gradient.
        function: `(*rows, *feeds, *accumulators) -> (*input_grads, *accumulators)`.
    """

    feeds: tuple[str, ...]
    num_inputs: int
    function: Callable[..., Sequence[tf.Tensor]]

    def __call__(
        self,
        values: Mapping[str, tf.Tensor],
        accumulators: Sequence[tf.Tensor],
        *rows: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the gradients of the inputs, and accumulators with this one added."""
        feeds = [values[feed] for feed in self.feeds]
        results = list(self.function(*rows, *feeds, *accumulators))
        return results[: self.num_inputs], results[self.num_inputs :]


@dataclasses.dataclass(frozen=True)
class Options:
    """How programs are built.

    Attributes:
        saves: Whether the forward keeps what the backward needs (no recomputation).
        may_be_empty: Whether microbatches without rows can occur and must be skipped.
        jit_compile: Whether XLA compiles the program.
    """

    saves: bool
    may_be_empty: bool
    jit_compile: bool


def build(trace: Trace, options: Options, name: str) -> tuple[Forward, Backward]:
    """Builds the forward and the backward program of a traced stage."""
    graph_def = _without_colocation(trace.graph.as_graph_def())
    graph = {node.name: tuple(node.input) for node in graph_def.node}
    operations = {op.name: op for op in trace.graph.get_operations()}
    sources = (*trace.inputs, *trace.weights, *trace.state, *trace.captures)
    made = [*trace.outputs, *_changed(trace), *_present(trace.loss)]
    gradients = [
        *_present(*trace.input_grads),
        *(n for g in _weight_grads(trace) for n in _present(g.values, g.indices)),
    ]
    given = _present(*trace.output_grads, trace.loss_grad)
    stateful = [name for name, op in operations.items() if op.op_def.is_stateful]
    if options.saves:
        constants = [name for name, op in operations.items() if op.type == "Const"]
        residuals = cut.saving(
            graph,
            sources=(*sources, *given),
            outputs=made,
            gradients=gradients,
            constants=constants,
        )
    else:
        residuals = cut.recomputing(
            graph,
            sources=(*sources, *given),
            outputs=made,
            gradients=gradients,
            stateful=stateful,
        )
    piece = _Pieces(trace, graph_def, graph, options.jit_compile)
    return (
        _forward(piece, options, made, residuals, sources, f"{name}_forward"),
        _backward(
            piece,
            options,
            gradients,
            (*given, *residuals, *sources),
            f"{name}_backward",
        ),
    )


def empty_accumulators(trace: Trace) -> list[tf.Tensor]:
    """Returns a zero for each weight that has a gradient, each in a buffer of its own.

    `Empty` is stateful, so no optimizer shares or folds these buffers: programs add to
    them in place.
    """
    return [
        tf.raw_ops.Empty(shape=spec.shape, dtype=spec.dtype, init=True)
        for spec in _accumulator_specs(trace)
    ]


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Copies parts of a traced stage into functions."""

    trace: Trace
    graph_def: tf.compat.v1.GraphDef
    graph: cut.Graph
    jit_compile: bool

    def function(
        self, fetches: Sequence[str], feeds: Sequence[str], name: str
    ) -> tuple[tuple[str, ...], Callable[..., list[tf.Tensor]]]:
        """Returns a function from some of `feeds` to `fetches`, and which it takes."""
        piece = cut.program(self.graph, fetches=fetches, feeds=feeds)
        captures = self.trace.captures
        taken = tuple(feed for feed in piece.feeds if feed not in captures)
        captured = {f: captures[f] for f in piece.feeds if f in captures}
        sub = tf.compat.v1.GraphDef(
            versions=self.graph_def.versions, library=self.graph_def.library
        )
        for node in self.graph_def.node:
            if node.name in piece.operations:
                copy = sub.node.add()
                copy.CopyFrom(node)
                del copy.input[:]
                copy.input.extend(
                    i
                    for i in node.input
                    if not i.startswith("^") or i[1:] in piece.operations
                )
        computed = [f for f in dict.fromkeys(fetches) if f not in piece.feeds]
        consumed = {cut.canonical(i) for node in sub.node for i in node.input}

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            values = {**dict(zip(taken, tensors, strict=True)), **captured}
            # An import maps only tensors of the very graph it goes to, which may be a
            # branch of a conditional; `identity` brings them there.
            values = {name: tf.identity(tensor) for name, tensor in values.items()}
            results = tf.graph_util.import_graph_def(
                sub,
                input_map={n: t for n, t in values.items() if n in consumed},
                return_elements=computed,
                name="",
            )
            values.update(zip(computed, results, strict=True))
            return [values[fetch] for fetch in fetches]

        if self.jit_compile:
            run.__name__ = name
            return taken, tf.function(run, autograph=False, jit_compile=True)
        return taken, run


def _forward(
    pieces: _Pieces,
    options: Options,
    made: Sequence[str],
    residuals: Sequence[str],
    sources: Sequence[str],
    name: str,
) -> Forward:
    trace = pieces.trace
    fetches = tuple(dict.fromkeys((*made, *residuals)))
    taken, run = pieces.function(fetches, sources, name)
    # An empty microbatch leaves the state as it was, so it takes that state as well.
    before = dict(zip(trace.new_state, trace.state, strict=True))
    kept = [before[fetch] for fetch in _changed(trace)] if options.may_be_empty else []
    feeds = tuple(dict.fromkeys((*taken, *kept)))

    def compute(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return run(*tensors[: len(taken)])

    def skip(*tensors: tf.Tensor) -> list[tf.Tensor]:
        values = dict(zip(feeds, tensors, strict=True))
        return [
            values[before[fetch]] if fetch in before else _nothing(trace.spec(fetch))
            for fetch in fetches
        ]

    function = _call(compute, skip, list(map(trace.spec, feeds)), options, name)
    return Forward(feeds, fetches, function)


def _backward(
    pieces: _Pieces,
    options: Options,
    gradients: Sequence[str],
    available: Sequence[str],
    name: str,
) -> Backward:
    trace = pieces.trace
    feeds, run = pieces.function(gradients, available, name)
    inputs = _present(*trace.input_grads)
    weight_grads = _weight_grads(trace)

    def add(*tensors: tf.Tensor) -> list[tf.Tensor]:
        taken, accumulators = tensors[: len(feeds)], tensors[len(feeds) :]
        values = dict(zip(gradients, run(*taken), strict=True))
        sums = [
            _add_in_place(accumulator, gradient, values)
            for accumulator, gradient in zip(accumulators, weight_grads, strict=True)
        ]
        return [*(values[name] for name in inputs), *sums]

    def skip(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return [*(_nothing(trace.spec(name)) for name in inputs), *tensors[len(feeds) :]]

    specs = [*map(trace.spec, feeds), *_accumulator_specs(trace)]
    return Backward(feeds, len(inputs), _call(add, skip, specs, options, name))


def _call(
    compute: Callable[..., list[tf.Tensor]],
    skip: Callable[..., list[tf.Tensor]],
    specs: Sequence[tf.TensorSpec],
    options: Options,
    name: str,
) -> Callable[..., Sequence[tf.Tensor]]:
    """Makes a TensorFlow function that stays a call where it is called.

    The number of rows is an argument only where it matters: a constant argument would
    make TensorFlow compile one copy of the function for every value.
    """

    def guarded(rows: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
        return tf.cond(rows > 0, lambda: compute(*tensors), lambda: skip(*tensors))

    function = compute
    if options.may_be_empty:
        function, specs = guarded, [tf.TensorSpec((), tf.int32), *specs]
    function.__name__ = name
    with tf.init_scope():
        return tf.function(
            function, autograph=False, experimental_attributes={"_noinline": True}
        ).get_concrete_function(*specs)


def _add_in_place(
    accumulator: tf.Tensor, gradient: Gradient, values: Values
) -> tf.Tensor:
    """Adds a gradient into the accumulator's own buffer.

    A function's argument is never the only reference to its buffer, so `acc + g` would
    allocate a second one, and fault its pages in, for every weight and microbatch.
    """
    value = values[gradient.values]
    if gradient.indices is not None:
        rows = tf.cast(values[gradient.indices], tf.int32)
        rows = tf.reshape(rows, [-1])
        value = tf.reshape(value, [-1, *accumulator.shape[1:]])
        return tf.raw_ops.InplaceAdd(x=accumulator, i=rows, v=value)
    total = tf.raw_ops.InplaceAdd(
        x=tf.reshape(accumulator, [1, -1]), i=[0], v=tf.reshape(value, [1, -1])
    )
    return tf.reshape(total, accumulator.shape)


def _nothing(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns a tensor of the given type without rows, which nobody reads."""
    if spec.dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=0, element_dtype=tf.float32
        )
    rank = spec.shape.rank or 0
    return tf.zeros([spec.shape[axis] or 0 for axis in range(rank)], spec.dtype)


def _accumulator_specs(trace: Trace) -> list[tf.TensorSpec]:
    return [
        trace.spec(weight)
        for weight, gradient in zip(trace.weights, trace.weight_grads, strict=True)
        if gradient is not None
    ]


def _weight_grads(trace: Trace) -> list[Gradient]:
    return [gradient for gradient in trace.weight_grads if gradient is not None]


def _changed(trace: Trace) -> list[str]:
    """Returns the new values of the state that the stage changes."""
    pairs = zip(trace.state, trace.new_state, strict=True)
    return [after for before, after in pairs if after != before]


def _present(*names: str | None) -> list[str]:
    return [name for name in names if name is not None]


def _without_colocation(graph_def: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """Drops requests to sit next to operations that another program may hold."""
    for node in graph_def.node:
        node.attr.pop("_class", None)
    return graph_def
