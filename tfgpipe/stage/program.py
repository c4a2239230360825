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

from tfgpipe._compat import functions
from tfgpipe.capture import differentiable
from tfgpipe.graph import MultiDeviceFunction
from tfgpipe.stage.accumulation import Sums, zero
from tfgpipe.stage.joint import Trace
from tfgpipe.stage.subgraph import Excerpt

Values = dict[str, tf.Tensor]

# Functions built so far, by what they compute.
FunctionCache = dict[Hashable, functions.Callee | MultiDeviceFunction]


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
    function: functions.Callee | MultiDeviceFunction

    def __call__(
        self,
        values: Mapping[str, tf.Tensor],
        sums: Sequence[tf.Tensor] = (),
        *rows: tf.Tensor,
        devices: Sequence[str] = (),
    ) -> tuple[Values, list[tf.Tensor]]:
        """Returns what it made, and the sums with its addends.

        Args:
            values: The tensors it takes, by name.
            sums: The sums so far, if it makes gradients of weights.
            *rows: The number of rows, if that may be zero.
            devices: Those of the shards; nothing for all here.
        """
        feeds = [values[feed] for feed in self.feeds]
        results = self.function(*rows, *feeds, *sums, devices=devices)
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
        core: In a computation for TPUs the core it is for, else None.
        num_microbatches: How many there are in a step, or None if that is not known.
    """

    saves: bool
    may_be_empty: bool
    jit_compile: bool
    on_cpu: bool = False
    core: str | None = None
    num_microbatches: int | None = None


def nothing_gathered(trace: Trace) -> Values:
    """Returns what is gathered of a mini-batch before its first microbatch."""
    names = itertools.chain(*trace.gathered)
    return {name: zero(trace.spec(name)) for name in names}


@dataclasses.dataclass(frozen=True)
class Builder:
    """Makes programs out of excerpts."""

    trace: Trace
    sums: Sums
    options: Options
    library: FunctionCache
    fingerprint: Hashable

    def once(self, excerpt: Excerpt, which: tuple[int, ...]) -> Program:
        """Makes a program that a step runs once.

        Args:
            excerpt: What it computes.
            which: Numbers that tell it from others of the stage.
        """
        specs = list(map(self.trace.spec, excerpt.feeds))
        function = self._call("once", lambda *x: excerpt.run(*x), specs, which)
        return Program(excerpt.feeds, excerpt.fetches, function)

    def end(self, excerpt: Excerpt) -> Program:
        """Makes the program from sums to gradients.

        Args:
            excerpt: What finishes some of the gradients.
        """
        gradients = self.sums.gradients
        summed = {gradient.values for gradient in gradients if gradient.finished}
        feeds = tuple(feed for feed in excerpt.feeds if feed not in summed)

        def compute(*tensors: tf.Tensor) -> list[tf.Tensor]:
            totals = self.sums.end(tensors[len(feeds) :])
            values = dict(zip(feeds, tensors, strict=False))
            values.update(zip((g.values for g in gradients), totals, strict=True))
            if excerpt.fetches:
                made = excerpt.run(*(values[feed] for feed in excerpt.feeds))
                values.update(zip(excerpt.fetches, made, strict=True))
            return [values[g.finished or g.values] for g in gradients]

        specs = [*map(self.trace.spec, feeds), *self.sums.specs]
        return Program(feeds, (), self._call("end", compute, specs))

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
            made = compute(*self._with_a_row(values, rows))
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

        specs = [*self._num_rows, *map(trace.spec, feeds)]
        function = self._call("forward", self._for_any(compute, skip, attend), specs)
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
        input_grads = present(*trace.input_grads)
        run = self._compiled(excerpt)

        def compute(*tensors: tf.Tensor) -> list[tf.Tensor]:
            taken, totals = tensors[: len(feeds)], list(tensors[len(feeds) :])
            values = dict(zip(excerpt.fetches, run(*taken), strict=True))
            if sums:
                totals = self.sums.add(totals, values)
            return [*(values[fetch] for fetch in fetches), *totals]

        def attend(rows: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
            values = dict(zip(feeds, tensors, strict=False))
            made = compute(*self._with_a_row(values, rows), *tensors[len(feeds) :])
            return [
                *(
                    new[:rows] if fetch in input_grads else new
                    for fetch, new in zip(fetches, made, strict=False)
                ),
                *made[len(fetches) :],
            ]

        def skip(*tensors: tf.Tensor) -> list[tf.Tensor]:
            nothing = [_nothing(trace.spec(fetch)) for fetch in fetches]
            totals = tensors[len(feeds) :]
            return [*nothing, *(self.sums.keep(totals) if sums else ())]

        specs = [*self._num_rows, *map(trace.spec, feeds)]
        if sums:
            specs += self.sums.specs
        function = self._call(name, self._for_any(compute, skip, attend), specs)
        return Program(feeds, tuple(fetches), function)

    def _with_a_row(self, values: Values, rows: tf.Tensor) -> list[tf.Tensor]:
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
        # Replicas meet between programs of XLA, not in them, and a program of XLA is on
        # one device.
        alone = not (self.trace.num_meetings or self.trace.is_sharded)
        if not (self.options.jit_compile and alone):
            return excerpt.run
        return tf.function(excerpt.run, autograph=False, jit_compile=True)

    @property
    def _num_rows(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec((), tf.int32)] if self.options.may_be_empty else []

    def _for_any(
        self,
        compute: Callable[..., list[tf.Tensor]],
        skip: Callable[..., list[tf.Tensor]],
        attend: Callable[..., list[tf.Tensor]],
    ) -> Callable[..., list[tf.Tensor]]:
        """Returns a function for any microbatch, also one that may have no rows.

        The number of rows is an argument only where it matters: a constant argument
        would make TensorFlow compile one copy of the function for every value.

        Args:
            compute: The function itself.
            skip: What to do in its place on a microbatch without rows.
            attend: The function on any number of rows, for stages whose replicas or
                shards meet.
        """
        if not self.options.may_be_empty:
            return compute
        if self.trace.num_meetings or self.trace.is_sharded:
            return attend

        def guarded(rows: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
            return tf.cond(rows > 0, lambda: compute(*tensors), lambda: skip(*tensors))

        return guarded

    def _call(
        self,
        name: str,
        function: Callable[..., list[tf.Tensor]],
        specs: Sequence[tf.TensorSpec],
        which: tuple[int, ...] = (),
    ) -> functions.Callee | MultiDeviceFunction:
        """Makes a TensorFlow function that stays a call where it is called.

        Of a stage in shards it is several calls.

        Args:
            name: What to call it.
            function: The function.
            specs: Shapes and types of its arguments.
            which: Numbers that tell it from others of that name.
        """
        key = (name, which, self.options, self.fingerprint)
        if key not in self.library:
            core = self.options.core
            made = function if core is None else _on_core(core, function)
            made.__name__ = f"program_{name}"
            with tf.init_scope():
                traced = tf.function(
                    made,
                    autograph=False,
                    experimental_attributes={"_noinline": True},
                ).get_concrete_function(*specs)
            on_tpu = core is not None
            self.library[key] = (
                MultiDeviceFunction(f"stage_{name}", traced, self.library)
                if self.trace.is_sharded
                else functions.Callee(f"stage_{name}", traced, on_tpu=on_tpu)
            )
        return self.library[key]


def _on_core(
    core: str, function: Callable[..., list[tf.Tensor]]
) -> Callable[..., list[tf.Tensor]]:
    """Returns a function all of whose operations are on one core of a TPU replica.

    There XLA puts an operation where its device says. That a function is called on some
    device says nothing of what is in it.
    """

    def placed(*tensors: tf.Tensor) -> list[tf.Tensor]:
        with tf.device(core):
            return function(*functions.barrier(tensors))

    return placed


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


def changed(trace: Trace) -> list[str]:
    """Returns the new values of what the stage carries on and changes."""
    pairs = zip(trace.carried, trace.new_carried, strict=True)
    return [after for before, after in pairs if after != before]


def present(*names: str | None) -> list[str]:
    """Returns the names that there are."""
    return [name for name in names if name is not None]
