"""Stage functions: forward, backward and its halves, as subgraphs of the joint graph.

A stage function takes the tensors it needs by name and returns the ones it makes by
name, so the executor keeps, for each stage and microbatch, one small dictionary of
tensors and need not know which of them a split of the joint graph turned out to need.

    joint graph ──┬─▶ forward           inputs, weights, carry ─▶ outputs, residuals
                  ├─▶ backward          residuals, output gradients ─▶ input gradients
                  ├─▶ backward_input    the first half of it
                  ├─▶ backward_weight   the second half: adds up gradients of weights
                  ├─▶ hoisted           what is the same for all microbatches, once
                  └─▶ finalize          accumulators ─▶ gradients of the weights, once

They stay *calls* in the graph of a training step, so that this graph grows with the
number of actions and not with the number of layers, and stages that compute the same
share them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.graph import MultiDeviceFunction, partitioner
from tfgpipe.stage import empty_batches, masked_gradients
from tfgpipe.stage.accumulation import Sums
from tfgpipe.stage.empty_batches import Compute, Values
from tfgpipe.stage.joint import Trace, present
from tfgpipe.stage.options import StageOptions
from tfgpipe.stage.subgraph import Excerpt, GraphSource


class DeviceFunction(Protocol):
    """A TensorFlow function of known shapes, on one device or on those of shards."""

    @property
    def graph(self) -> tf.Graph:
        """What it computes."""

    def __call__(
        self, *tensors: tf.Tensor, devices: Sequence[str] = ()
    ) -> list[tf.Tensor]:
        """Calls it; `devices` are those of the shards."""


# Functions made so far, by what they compute.
FunctionCache = dict[Hashable, DeviceFunction]


@dataclasses.dataclass(frozen=True)
class StageFunction:
    """One function of a stage.

    Attributes:
        feeds: Names of the tensors it takes.
        fetches: Names of the tensors it makes beside accumulators.
        function: The function itself, `(*rows, *feeds, *sums) -> (*fetches, *sums)`,
            where `rows` is the number of rows of the microbatch if that may be zero,
            else nothing, and `sums` are the accumulators of weight gradients.
    """

    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    function: DeviceFunction

    def __call__(
        self,
        values: Mapping[str, tf.Tensor],
        sums: Sequence[tf.Tensor] = (),
        *rows: tf.Tensor,
        devices: Sequence[str] = (),
    ) -> tuple[Values, list[tf.Tensor]]:
        """Returns what it makes, and the updated accumulators.

        Args:
            values: The tensors it takes, by name.
            sums: The accumulators, if it makes gradients of weights.
            *rows: The number of rows, if that may be zero.
            devices: Those of the shards; nothing for all here.
        """
        feeds = [values[feed] for feed in self.feeds]
        results = self.function(*rows, *feeds, *sums, devices=devices)
        made, sums = results[: len(self.fetches)], results[len(self.fetches) :]
        return dict(zip(self.fetches, made, strict=True)), sums


class StageFunctions:
    """The functions of a traced stage, each made when it is first asked for.

    Args:
        trace: The stage.
        options: How it runs.
        saves: Whether the forward keeps what spares the backward any recomputation.
        cache: Functions to share. New ones are added.

    Attributes:
        sums: How the gradients of the weights are summed over microbatches.
        hoistable: Names of tensors that are the same for all microbatches of a step.
        residuals: Names of the tensors that the forward saves for the backward.
    """

    def __init__(
        self,
        trace: Trace,
        options: StageOptions,
        *,
        saves: bool,
        cache: FunctionCache,
    ) -> None:
        self._source = source = GraphSource(trace)
        self._invariant = trace.invariant
        if options.num_microbatches != 1:
            trace = masked_gradients.unmasked(trace, source)
        self._trace = trace
        self._options = options
        self._cache = cache
        self._key = (saves, options.code, source.fingerprint)
        self.sums = Sums(trace, options)
        self._hoisted: dict[tuple[str, ...], StageFunction] = {}
        forward, backward = trace.forward, trace.backward
        self._outputs = [*forward.outputs, *trace.changed_carry, *present(forward.loss)]
        self._input_grads = present(*backward.input_grads)
        self._gradients = [*self._input_grads, *self.sums.names]
        self.hoistable = partitioner.lasting(
            source.graph,
            sources=self._invariant,
            fetches=[*self._outputs, *self._gradients],
            constants=source.constants,
            stateful=source.stateful,
            worthwhile=source.worthwhile,
        )
        given = trace.given
        self._sources = (
            *self.hoistable,
            *given.inputs,
            *given.weights,
            *trace.carry,
            *given.replicas,
        )
        self._known = (*self._sources, *backward.given, *trace.captures)
        ends = {
            "sources": self._known,
            "outputs": self._outputs,
            "gradients": self._gradients,
        }
        if saves:
            self.residuals = partitioner.saving(
                source.graph, constants=source.constants, done=forward.effects, **ends
            )
        else:
            self.residuals = partitioner.recomputing(
                source.graph, stateful=source.stateful, **ends
            )

    @functools.cached_property
    def forward(self) -> StageFunction:
        """The forward."""
        trace = self._trace
        excerpt = self._source.excerpt(
            fetches=(*self._outputs, *self.residuals),
            feeds=self._sources,
            effects=trace.forward.effects,
        )
        # A microbatch without rows leaves the carry as it was, so that is fed as well.
        before = dict(zip(trace.new_carry, trace.carry, strict=True))
        kept = (before[after] for after in trace.changed_carry)
        feeds = tuple(dict.fromkeys((*excerpt.feeds, *kept)))
        return self._function("forward", self._run(excerpt), feeds, excerpt.fetches)

    @functools.cached_property
    def backward(self) -> StageFunction:
        """The whole backward."""
        excerpt = self._backward_excerpt(self._gradients)
        return self._backward("backward", excerpt, self._input_grads)

    @functools.cached_property
    def backward_input(self) -> StageFunction:
        """The half of the backward that computes input gradients.

        It recomputes what both halves need, and passes on what the second half reads.
        """
        kept = [name for name in self._between if name not in self.residuals]
        made = tuple(dict.fromkeys([*self._input_grads, *kept]))
        excerpt = self._backward_excerpt(made)
        return self._function(
            "backward_input", self._run(excerpt), excerpt.feeds, made, rows=True
        )

    @functools.cached_property
    def backward_weight(self) -> StageFunction:
        """The half of the backward that computes weight gradients."""
        excerpt = self._backward_excerpt(self.sums.names, self._between)
        return self._backward("backward_weight", excerpt, ())

    def hoisted(
        self, run: StageFunction, values: Values, devices: Sequence[str] = ()
    ) -> Values:
        """Returns what a function takes of `hoistable`, but for what is there already.

        Args:
            run: One of the functions.
            values: What there is, the weights and the state among it.
            devices: Those of the shards; nothing for all here.
        """
        names = tuple(n for n in self.hoistable if n in run.feeds and n not in values)
        if not names:
            return {}
        if names not in self._hoisted:
            excerpt = self._source.excerpt(fetches=names, feeds=self._invariant)
            self._hoisted[names] = self._function(
                "hoisted",
                lambda values, sums: (_called(excerpt.run, excerpt, values), [*sums]),
                excerpt.feeds,
                excerpt.fetches,
                which=tuple(map(self.hoistable.index, names)),
                rows=False,
            )
        return self._hoisted[names](values, devices=devices)[0]

    @functools.cached_property
    def finalize(self) -> StageFunction:
        """The function from the accumulators of all microbatches to the gradients."""
        excerpt = masked_gradients.masked(
            self._trace, self._source, (*self.hoistable, *self._invariant)
        )
        gradients = self.sums.gradients
        summed = {gradient.values for gradient in gradients if gradient.finalized}

        def compute(
            values: Values, sums: Sequence[tf.Tensor]
        ) -> tuple[Values, list[tf.Tensor]]:
            totals = zip(
                (g.values for g in gradients), self.sums.end(sums), strict=True
            )
            values = {**values, **dict(totals)}
            if excerpt.fetches:
                values.update(_called(excerpt.run, excerpt, values))
            return {}, [values[g.finalized or g.values] for g in gradients]

        feeds = tuple(feed for feed in excerpt.feeds if feed not in summed)
        return self._function("finalize", compute, feeds, (), rows=False, sums=True)

    def _backward(
        self, name: str, excerpt: Excerpt, fetches: Sequence[str]
    ) -> StageFunction:
        """Makes a function that adds up gradients of weights."""
        run = self._run(excerpt)

        def compute(
            values: Values, sums: Sequence[tf.Tensor]
        ) -> tuple[Values, list[tf.Tensor]]:
            made, _ = run(values, ())
            return made, self.sums.add(sums, made)

        return self._function(name, compute, excerpt.feeds, tuple(fetches), sums=True)

    def _backward_excerpt(
        self, fetches: Sequence[str], between: Sequence[str] = ()
    ) -> Excerpt:
        feeds = (*between, *self._trace.backward.given, *self.residuals, *self._sources)
        return self._source.excerpt(
            fetches=fetches,
            feeds=tuple(dict.fromkeys(feeds)),
            done=self._trace.forward.effects,
        )

    @functools.cached_property
    def _between(self) -> tuple[str, ...]:
        """Names of the tensors that cross between the halves of the backward."""
        return partitioner.halves(
            self._source.graph,
            sources=self._known,
            outputs=self._outputs,
            input_grads=self._input_grads,
            weight_grads=self.sums.names,
            constants=self._source.constants,
            done=self._trace.forward.effects,
        )

    def _run(self, excerpt: Excerpt) -> Compute:
        """Returns an excerpt as a function of values by name, compiled if asked for."""
        run: Callable[..., list[tf.Tensor]] = excerpt.run
        # XLA compiles for one device, and what it compiles cannot take part in a
        # collective.
        if self._options.jit_compile and not self._trace_meets:
            run = tf.function(run, autograph=False, jit_compile=True)
        return lambda values, sums: (_called(run, excerpt, values), list(sums))

    @property
    def _trace_meets(self) -> bool:
        """Whether a microbatch takes part in collectives, or is on several devices."""
        return bool(self._trace.num_collectives or self._trace.is_sharded)

    def _function(
        self,
        name: str,
        compute: Compute,
        feeds: Sequence[str],
        fetches: Sequence[str],
        *,
        which: tuple[int, ...] = (),
        rows: bool = True,
        sums: bool = False,
    ) -> StageFunction:
        """Makes a function that stays a call where it is called.

        Of a stage in shards it is several calls.

        Args:
            name: What to call it.
            compute: What it computes.
            feeds: Names of what it takes.
            fetches: Names of what it makes.
            which: Indices that tell it from others of that name.
            rows: Whether it is run on microbatches, which may have no rows.
            sums: Whether it takes accumulators.
        """
        feeds, fetches = tuple(feeds), tuple(fetches)
        key = (name, which, self._key)
        if key not in self._cache:
            # The number of rows is an argument only where it matters: a constant one
            # would make TensorFlow compile a copy of the function for every value.
            guards = rows and self._options.may_be_empty
            specs = [tf.TensorSpec((), tf.int32)] if guards else []
            specs += [*map(self._trace.spec, feeds), *(self.sums.specs if sums else ())]
            guarded = empty_batches.guarded(
                self._trace,
                compute,
                fetches,
                self.sums.keep if sums else list,
                always_runs=self._trace_meets,
            )

            def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
                first, given = tensors[: int(guards)], tensors[int(guards) :]
                values = dict(zip(feeds, given, strict=False))
                totals = list(given[len(feeds) :])
                made, totals = (
                    guarded(first[0], values, totals)
                    if guards
                    else compute(values, totals)
                )
                return [*(made[fetch] for fetch in fetches), *totals]

            self._cache[key] = self._made(name, run, specs)
        return StageFunction(feeds, fetches, self._cache[key])

    def _made(
        self,
        name: str,
        run: Callable[..., list[tf.Tensor]],
        specs: Sequence[tf.TensorSpec],
    ) -> DeviceFunction:
        core = self._options.tpu_core
        placed = run if core is None else _on_core(core, run)
        function = functions.make(placed, specs, name=f"program_{name}")
        if self._trace.is_sharded:
            return MultiDeviceFunction(f"stage_{name}", function, self._cache)
        return functions.Callee(f"stage_{name}", function, on_tpu=core is not None)


def _called(
    run: Callable[..., list[tf.Tensor]], excerpt: Excerpt, values: Values
) -> Values:
    """Runs an excerpt on values by name."""
    made = run(*(values[feed] for feed in excerpt.feeds))
    return dict(zip(excerpt.fetches, made, strict=True))


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
