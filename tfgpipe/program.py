"""A program of a stage: a piece of its trace, called once for every microbatch.

A program takes the tensors it needs by name and returns the ones it makes by name, so
the pipeline keeps, for each stage and microbatch, one small dictionary of tensors and
need not know which of them a cut turned out to need.

Programs stay *calls* in the graph of a training step (`_noinline`), so that this graph
grows with the number of actions and not with the number of layers, and stages that
compute the same share them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

import tensorflow as tf

from tfgpipe.calls import Callee
from tfgpipe.excerpt import Excerpt
from tfgpipe.trace import Gradient, Trace, differentiable

Values = dict[str, tf.Tensor]

# Functions built so far, by what they compute.
Library = dict[Hashable, Callee]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a stage: its forward, its backward, or one half of the backward.

    Attributes:
        feeds: Names of the tensors it takes.
        fetches: Names of the tensors it makes beside gradients of weights.
        function: The function itself, `(*rows, *feeds, *sums) -> (*fetches, *sums)`,
            where `rows` is the number of rows of the microbatch if that may be zero,
            else nothing, and `sums` are what it adds gradients of weights to.
    """

    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    function: Callee

    def __call__(
        self,
        values: Mapping[str, tf.Tensor],
        sums: Sequence[tf.Tensor] = (),
        *rows: tf.Tensor,
    ) -> tuple[Values, list[tf.Tensor]]:
        """Returns what it made, and the sums with its addends.

        Args:
            values: The tensors it takes, by name.
            sums: A sum for each weight that has a gradient, if it makes those.
            *rows: The number of rows, if that may be zero.
        """
        feeds = [values[feed] for feed in self.feeds]
        results = self.function(*rows, *feeds, *sums)
        made, sums = results[: len(self.fetches)], results[len(self.fetches) :]
        return dict(zip(self.fetches, made, strict=True)), sums


@dataclasses.dataclass(frozen=True)
class Options:
    """How programs are built.

    Attributes:
        saves: Whether the forward keeps what the backward needs (no recomputation).
        may_be_empty: Whether microbatches without rows can occur and must be skipped.
        jit_compile: Whether XLA compiles the program.
        on_cpu: Whether it runs on a CPU, by TensorFlow's own kernels.
    """

    saves: bool
    may_be_empty: bool
    jit_compile: bool
    on_cpu: bool = False


def empty_accumulators(trace: Trace) -> list[tf.Tensor]:
    """Returns a zero for each weight that has a gradient, each in a buffer of its own.

    Programs add to them in place.
    """
    return list(map(_zero, _accumulator_specs(trace)))


def nothing_gathered(trace: Trace) -> Values:
    """Returns what is gathered of a mini-batch before its first microbatch."""
    names = itertools.chain(*trace.gathered)
    return {name: _zero(trace.spec(name)) for name in names}


@dataclasses.dataclass(frozen=True)
class Builder:
    """Makes programs out of excerpts."""

    trace: Trace
    options: Options
    library: Library
    fingerprint: str

    def forward(self, excerpt: Excerpt) -> Program:
        """Makes a forward program."""
        trace = self.trace
        before = dict(zip(trace.new_carried, trace.carried, strict=True))
        # An empty microbatch leaves the state as it was, so it takes that as well.
        kept = [before[after] for after in changed(trace)]
        feeds = tuple(dict.fromkeys((*excerpt.feeds, *kept)))
        run = self._compiled(excerpt)

        def compute(*tensors: tf.Tensor) -> list[tf.Tensor]:
            return run(*tensors[: len(excerpt.feeds)])

        def attend(rows: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
            values = dict(zip(feeds, tensors, strict=True))
            made = compute(*self._stand_in(values, rows))
            return [
                tf.where(rows > 0, new, values[before[fetch]])
                if fetch in before
                else new[:rows]
                if fetch in trace.outputs
                else new
                for fetch, new in zip(excerpt.fetches, made, strict=True)
            ]

        def skip(*tensors: tf.Tensor) -> list[tf.Tensor]:
            values = dict(zip(feeds, tensors, strict=True))
            return [
                values[before[fetch]]
                if fetch in before
                else _nothing(trace.spec(fetch))
                for fetch in excerpt.fetches
            ]

        specs = [trace.spec(feed) for feed in feeds]
        function = self._call("forward", compute, skip, attend, specs)
        return Program(feeds, excerpt.fetches, function)

    def backward(
        self, name: str, excerpt: Excerpt, fetches: Sequence[str], *, sums: bool = True
    ) -> Program:
        """Makes a backward program.

        Args:
            name: What to call it.
            excerpt: What it computes.
            fetches: What it returns beside gradients of weights.
            sums: Whether it adds up gradients of weights.
        """
        trace, feeds = self.trace, excerpt.feeds
        weight_grads = weight_grads_of(trace) if sums else []
        input_grads = present(*trace.input_grads)
        run = self._compiled(excerpt)

        def compute(*tensors: tf.Tensor) -> list[tf.Tensor]:
            taken, accumulators = tensors[: len(feeds)], tensors[len(feeds) :]
            values = dict(zip(excerpt.fetches, run(*taken), strict=True))
            gradients = zip(accumulators, weight_grads, strict=True)
            totals = [_add(total, new, values) for total, new in gradients]
            return [*(values[fetch] for fetch in fetches), *totals]

        def attend(rows: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
            values = dict(zip(feeds, tensors, strict=False))
            made = compute(*self._stand_in(values, rows), *tensors[len(feeds) :])
            return [
                *(
                    new[:rows] if fetch in input_grads else new
                    for fetch, new in zip(fetches, made, strict=False)
                ),
                *made[len(fetches) :],
            ]

        def skip(*tensors: tf.Tensor) -> list[tf.Tensor]:
            nothing = [_nothing(trace.spec(fetch)) for fetch in fetches]
            return [*nothing, *tensors[len(feeds) :]]

        specs = list(map(trace.spec, feeds))
        if sums:
            specs += _accumulator_specs(trace)
        function = self._call(name, compute, skip, attend, specs)
        return Program(feeds, tuple(fetches), function)

    def _stand_in(self, values: Values, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns values with one row made up where there is none.

        Most layers make no sense of no rows, and none harms by one whose result is cut
        off and whose gradient is zero.
        """
        trace = self.trace
        return [
            _filled(value, rows, 0)
            if name in trace.output_grads
            else _filled(value, rows, int(differentiable(value)))
            if name in trace.inputs or name in trace.outputs
            else value
            for name, value in values.items()
        ]

    def _compiled(self, excerpt: Excerpt) -> Callable[..., list[tf.Tensor]]:
        # Replicas meet between programs of XLA, not in them.
        if not self.options.jit_compile or self.trace.num_meetings:
            return excerpt.run
        return tf.function(excerpt.run, autograph=False, jit_compile=True)

    def _call(
        self,
        name: str,
        compute: Callable[..., list[tf.Tensor]],
        skip: Callable[..., list[tf.Tensor]],
        attend: Callable[..., list[tf.Tensor]],
        specs: Sequence[tf.TensorSpec],
    ) -> Callee:
        """Makes a TensorFlow function that stays a call where it is called.

        The number of rows is an argument only where it matters: a constant argument
        would make TensorFlow compile one copy of the function for every value.

        Args:
            name: What to call it.
            compute: The function itself.
            skip: What to do in its place on a microbatch without rows.
            attend: The function on any number of rows, for stages whose replicas meet.
            specs: Shapes and types of the arguments.
        """

        def guarded(rows: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
            return tf.cond(rows > 0, lambda: compute(*tensors), lambda: skip(*tensors))

        key = (name, self.options, self.fingerprint)
        if key not in self.library:
            function = compute
            if self.options.may_be_empty:
                function = attend if self.trace.num_meetings else guarded
                specs = [tf.TensorSpec((), tf.int32), *specs]
            function.__name__ = f"program_{name}"
            with tf.init_scope():
                traced = tf.function(
                    function,
                    autograph=False,
                    experimental_attributes={"_noinline": True},
                ).get_concrete_function(*specs)
            self.library[key] = Callee(f"stage_{name}", traced)
        return self.library[key]


def add_in_place(total: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Adds a gradient into the accumulator's own buffer.

    A function's argument is never the only reference to its buffer, so `acc + g` would
    allocate a second one, and fault its pages in, for every weight and microbatch.
    """
    added = tf.raw_ops.InplaceAdd(
        x=tf.reshape(total, [1, -1]), i=[0], v=tf.reshape(value, [1, -1])
    )
    return tf.reshape(added, total.shape)


def _add(total: tf.Tensor, gradient: Gradient, values: Values) -> tf.Tensor:
    """Adds a gradient, in either of its forms, to a sum."""
    value = values[gradient.values]
    if gradient.indices is None:
        return add_in_place(total, value)
    value = tf.reshape(value, [-1, *total.shape[1:]])
    # Each row once: on a GPU additions to one row would overtake one another.
    rows, where = tf.unique(tf.reshape(values[gradient.indices], [-1]))
    value = tf.math.unsorted_segment_sum(value, where, tf.size(rows))
    return tf.raw_ops.InplaceAdd(x=total, i=tf.cast(rows, tf.int32), v=value)


def _zero(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns a zero in a buffer of its own.

    `Empty` is stateful, so no optimizer shares or folds these buffers.
    """
    return tf.raw_ops.Empty(shape=spec.shape, dtype=spec.dtype, init=True)


def _nothing(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns a tensor of the given type without rows, which nobody reads."""
    if spec.dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=0, element_dtype=tf.float32
        )
    rank = spec.shape.rank or 0
    return tf.zeros([spec.shape[axis] or 0 for axis in range(rank)], spec.dtype)


def _filled(tensor: tf.Tensor, rows: tf.Tensor, number: int) -> tf.Tensor:
    """Returns a row of one number in place of a tensor without rows."""

    def row() -> tf.Tensor:
        sizes = tf.maximum(tf.shape(tensor)[1:], 1)
        return tf.fill(tf.concat([[1], sizes], 0), tf.cast(number, tensor.dtype))

    filled = tf.cond(rows > 0, lambda: tensor, row)
    return tf.ensure_shape(filled, tensor.shape)


def _accumulator_specs(trace: Trace) -> list[tf.TensorSpec]:
    return [
        trace.spec(weight)
        for weight, gradient in zip(trace.weights, trace.weight_grads, strict=True)
        if gradient is not None
    ]


def weight_grads_of(trace: Trace) -> list[Gradient]:
    """Returns the gradients of a stage's weights that have one."""
    return [gradient for gradient in trace.weight_grads if gradient is not None]


def changed(trace: Trace) -> list[str]:
    """Returns the new values of what the stage carries on and changes."""
    pairs = zip(trace.carried, trace.new_carried, strict=True)
    return [after for before, after in pairs if after != before]


def present(*names: str | None) -> list[str]:
    """Returns the names that there are."""
    return [name for name in names if name is not None]
