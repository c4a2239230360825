"""Stage functions: forward, backward and its halves, as subgraphs of the joint graph.

A stage function takes the tensors it needs by name and returns the ones it makes by
name, so the executor keeps, for each stage and microbatch, one small dictionary of
tensors and need not know which of them a split of the joint graph turned out to need.

    joint graph ──┬─▶ forward           inputs, weights, carry ─▶ outputs, residuals
                  ├─▶ backward          residuals, output gradients ─▶ input gradients
                  ├─▶ backward_input    the first half of it
                  ├─▶ backward_weight   the second half: adds up gradients of weights
                  ├─▶ hoisted           what is the same for all microbatches, once
                  ├─▶ host              what the host makes of a microbatch for a GPU
                  └─▶ finalize          accumulators ─▶ gradients of the weights, once

They stay *calls* in the graph of a training step, so that this graph grows with the
number of actions and not with the number of layers, and stages that compute the same
share them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.graph import joint_graph, multi_device, partitioner, recomputation
from tfgpipe.remat import ForwardGraph
from tfgpipe.schedules import ActionKind
from tfgpipe.stage import empty_batches, recomputed_graph
from tfgpipe.stage.accumulation import GradientAccumulation
from tfgpipe.stage.empty_batches import Compute, NamedTensors
from tfgpipe.stage.options import StageOptions
from tfgpipe.stage.subgraph import GraphSource, SubgraphFunction


class DeviceFunction(Protocol):
    """A TensorFlow function of known shapes, on one device or on those of shards."""

    @property
    def graph(self) -> tf.Graph:
        """The graph that it computes."""

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
    ) -> tuple[NamedTensors, list[tf.Tensor]]:
        """Returns its outputs and the updated accumulators.

        Args:
            values: The tensors it takes, by name.
            sums: The accumulators, if it makes gradients of weights.
            *rows: The number of rows, if that may be zero.
            devices: Devices of the shards; empty for the current device.
        """
        feeds = [values[feed] for feed in self.feeds]
        results = self.function(*rows, *feeds, *sums, devices=devices)
        made, sums = results[: len(self.fetches)], results[len(self.fetches) :]
        return dict(zip(self.fetches, made, strict=True)), sums


class StageFunctions:
    """The functions of a traced stage, each made when it is first asked for.

    Args:
        trace: The stage.
        options: Its options.
        saves: True if the forward saves the tensors that spare the backward any
            recomputation.
        saved: Names of results that it saves in any case.
        cache: Functions to share. New ones are added.

    Attributes:
        accumulation: The accumulation of weight gradients over microbatches.
    """

    def __init__(
        self,
        trace: joint_graph.JointGraph,
        options: StageOptions,
        *,
        saves: bool,
        saved: tuple[str, ...] = (),
        cache: FunctionCache,
    ) -> None:
        self._source = GraphSource(trace)
        self._trace = trace
        if options.compiles_everything:
            self._check_compiles(options)
        if self._spans_devices:
            # XLA compiles for one device, and what it compiles cannot take part in a
            # collective.
            options = dataclasses.replace(options, jit_compile=False)
        self._options = options
        self._saves = saves
        self._saved = saved
        self._cache = cache
        # Equal graphs of other names share functions.
        places = {name: i for i, name in enumerate(trace.edges if saved else ())}
        which = tuple((places[partitioner.op_name(x)], x.split(":")[1]) for x in saved)
        self._key = (saves, which, options.code, self._source.fingerprint)
        self.accumulation = GradientAccumulation(trace, options)
        self._hoisted: dict[tuple[str, ...], StageFunction] = {}
        host_state = trace.integer_state if options.uses_gpu_kernels else ()
        self._new_host_state = [trace.assigned[before] for before in host_state]
        # Short integers are in the memory of the host as long as they are arguments.
        inputs = trace.given.inputs
        integers = (x for x in inputs if trace.spec(x).dtype == tf.int32)
        self._on_host = (*host_state, *integers)
        self._carry = [x for x in trace.changed_carry if x not in self._new_host_state]
        loss = joint_graph.not_none(trace.forward.loss)
        self._outputs = [*trace.forward.outputs, *self._carry, *loss]
        self._input_grads = joint_graph.not_none(*trace.backward.input_grads)
        self._gradients = [*self._input_grads, *self.accumulation.addend_names]

    @functools.cached_property
    def hoistable(self) -> tuple[str, ...]:
        """Names of tensors that are the same for all microbatches of a step."""
        return self._made_of(self._trace.invariant, self._source.hoistable_ops)

    @functools.cached_property
    def host_made(self) -> tuple[str, ...]:
        """Names of tensors that the host makes of each microbatch for a GPU."""
        if not self._options.uses_gpu_kernels:
            return ()
        return self._made_of(self._on_host, self._source.host_ops)

    def _made_of(
        self, given: Collection[str], operations: Collection[str]
    ) -> tuple[str, ...]:
        """Returns the tensors that these operations make of given ones alone."""
        updates = self._trace.per_step_updates.values()
        return partitioner.hoistable_tensors(
            self._source.graph,
            fetches=[*self._outputs, *self._gradients, *updates],
            constants=self._source.constants,
            stateful=self._source.stateful,
            invariant=given,
            hoistable_ops=operations,
        )

    @functools.cached_property
    def residuals(self) -> tuple[str, ...]:
        """Names of the tensors that the forward saves for the backward."""
        ends = {
            "sources": self._known,
            "outputs": self._outputs,
            "gradients": self._gradients,
        }
        source = self._source
        if not self._saves:
            return partitioner.saved_tensors_under_remat(
                source.graph, stateful=source.stateful, saved=self._saved, **ends
            )
        return partitioner.saved_tensors(
            source.graph,
            constants=source.constants,
            completed=self._trace.forward.side_effects,
            **ends,
        )

    def read_later(self, backward: Collection[ActionKind]) -> tuple[str, ...]:
        """Returns names of a microbatch's tensors that only its backward still reads.

        Args:
            backward: The kinds of its passes.
        """
        made = {*self.residuals, *self._trace.given.inputs}.difference(
            self.hoistable, self.host_made
        )
        read = dict.fromkeys(x for kind in backward for x in self.of(kind).feeds)
        return tuple(name for name in read if name in made)

    @functools.cached_property
    def recomputed_ops(self) -> frozenset[str]:
        """Names of the operations of the forward that the backward runs again."""
        forward = partitioner.subgraph(
            self._source.graph, fetches=self._outputs, feeds=self._known
        )
        return forward.operations & self._backward_ops()

    def _backward_ops(self, saved: Collection[str] = ()) -> frozenset[str]:
        """Returns the names of the operations of the backward.

        Args:
            saved: Names of tensors that forwards save beside the residuals.
        """
        feeds = tuple(dict.fromkeys((*self.residuals, *saved, *self._known)))
        return partitioner.subgraph(
            self._source.graph,
            fetches=self._gradients,
            feeds=feeds,
            completed=self._trace.forward.side_effects,
        ).operations

    @functools.cached_property
    def forward_graph(self) -> ForwardGraph:
        """The operations that the backward recomputes, for a policy to choose from."""
        again = self.recomputed_ops
        sizes = recomputed_graph.buffer_sizes(self._trace, again)

        def peak_bytes(saved: Collection[str]) -> float:
            needed = self._backward_ops(saved)
            return recomputation.peak_bytes(
                self._source.graph,
                needed,
                recomputed=again & needed,
                sizes=sizes,
            )

        return recomputed_graph.forward_graph(
            self._trace,
            self._source.graph,
            recomputed=again,
            gradient=self._backward_ops() - again,
            gradients=self._gradients,
            peak_bytes=peak_bytes,
        )

    @functools.cached_property
    def _split_tensors(self) -> tuple[str, ...]:
        """Names of the tensors that cross between the halves of the backward."""
        return partitioner.backward_split_tensors(
            self._source.graph,
            sources=self._known,
            outputs=self._outputs,
            input_grads=self._input_grads,
            weight_grads=self.accumulation.addend_names,
            constants=self._source.constants,
            completed=self._trace.forward.side_effects,
        )

    @functools.cached_property
    def _sources(self) -> tuple[str, ...]:
        """Names of what a microbatch's forward can take."""
        given = self._trace.given
        made = (*self.hoistable, *self.host_made)
        return (*made, *given.inputs, *self._trace.carry, *given.replicas)

    @property
    def _known(self) -> tuple[str, ...]:
        """Names of all that comes from outside."""
        return (*self._sources, *self._trace.backward.given, *self._trace.captures)

    def of(self, kind: ActionKind) -> StageFunction:
        """Returns the function of a kind of pass: the attribute of its name."""
        function: StageFunction = getattr(self, kind.name)
        return function

    @functools.cached_property
    def forward(self) -> StageFunction:
        """The forward."""
        subgraph = self._source.extract(
            fetches=(*self._outputs, *self.residuals),
            feeds=self._sources,
            side_effects=self._trace.forward.side_effects,
        )
        # Hoisted, whether or not a microbatch uses them.
        updates = self._trace.per_step_updates.values()
        return self._pass(
            "forward", subgraph, more=(*updates, *self._before(self._carry))
        )

    @functools.cached_property
    def host(self) -> StageFunction | None:
        """The function of what the host makes of a microbatch, before the forward.

        GPUs would have the host wait for seeds and indices: some operations on integers
        have kernels on GPUs, others are run by the host. It is None if there are none.
        """
        fetches = (*self.host_made, *self._new_host_state)
        if not fetches:
            return None
        subgraph = self._source.extract(fetches=fetches, feeds=self._on_host)
        return self._pass("host", subgraph, more=self._before(self._new_host_state))

    def _before(self, new_carry: Sequence[str]) -> list[str]:
        """Returns the carry before; a microbatch without rows leaves it so."""
        before = dict(zip(self._trace.new_carry, self._trace.carry, strict=True))
        return [before[after] for after in new_carry]

    @functools.cached_property
    def backward(self) -> StageFunction:
        """The whole backward."""
        subgraph = self._backward_subgraph(self._gradients)
        return self._pass("backward", subgraph, adds_beside=self._input_grads)

    @functools.cached_property
    def backward_input(self) -> StageFunction:
        """The half of the backward that computes input gradients.

        It recomputes what both halves need, and passes on what the second half reads.
        """
        kept = [name for name in self._split_tensors if name not in self.residuals]
        subgraph = self._backward_subgraph([*self._input_grads, *kept])
        return self._pass("backward_input", subgraph)

    @functools.cached_property
    def backward_weight(self) -> StageFunction:
        """The half of the backward that computes weight gradients."""
        addends = self.accumulation.addend_names
        subgraph = self._backward_subgraph(addends, self._split_tensors)
        return self._pass("backward_weight", subgraph, adds_beside=())

    def _backward_subgraph(
        self, fetches: Sequence[str], between: Sequence[str] = ()
    ) -> SubgraphFunction:
        feeds = (*between, *self._trace.backward.given, *self.residuals, *self._sources)
        return self._source.extract(
            fetches=fetches,
            feeds=tuple(dict.fromkeys(feeds)),
            completed=self._trace.forward.side_effects,
            recomputed=() if self._saves else self.recomputed_ops,
        )

    def hoisted(
        self, run: StageFunction, values: NamedTensors, devices: Sequence[str] = ()
    ) -> NamedTensors:
        """Returns the hoisted tensors of a function that are not there yet.

        Args:
            run: One of the functions.
            values: All tensors by name, weights and state among them.
            devices: Devices of the shards; empty for the current device.
        """
        names = tuple(n for n in self.hoistable if n in run.feeds and n not in values)
        if not names:
            return {}
        if names not in self._hoisted:
            subgraph = self._source.extract(fetches=names, feeds=self._trace.invariant)
            self._hoisted[names] = self._function(
                "hoisted",
                lambda values, sums: (subgraph.by_name(values), list(sums)),
                subgraph.feeds,
                subgraph.fetches,
                which=tuple(map(self.hoistable.index, names)),
                rows=False,
            )
        return self._hoisted[names](values, devices=devices)[0]

    @functools.cached_property
    def finalize(self) -> StageFunction:
        """The function from the accumulators of all microbatches to the gradients."""
        gradients = self.accumulation.gradients
        summed = [gradient.values for gradient in gradients if gradient.finalized]
        subgraph = self._source.extract(
            fetches=[g.finalized for g in gradients if g.finalized],
            feeds=[*summed, *self.hoistable, *self._trace.invariant],
        )

        def compute(
            values: NamedTensors, sums: Sequence[tf.Tensor]
        ) -> tuple[NamedTensors, list[tf.Tensor]]:
            totals = self.accumulation.finalize(sums)
            names = (gradient.values for gradient in gradients)
            values = {**values, **dict(zip(names, totals, strict=True))}
            if subgraph.fetches:
                values.update(subgraph.by_name(values))
            return {}, [values[g.finalized or g.values] for g in gradients]

        feeds = tuple(feed for feed in subgraph.feeds if feed not in summed)
        return self._function("finalize", compute, feeds, (), rows=False, sums=True)

    @property
    def _spans_devices(self) -> bool:
        """True if a microbatch takes part in collectives, or is on several devices."""
        return bool(self._trace.num_collectives or self._trace.is_sharded)

    def _check_compiles(self, options: StageOptions) -> None:
        """Raises ValueError for what XLA cannot compile and a TPU has no kernel for."""
        if self._spans_devices:
            raise ValueError(
                "On TPUs XLA compiles each function of a stage, for one device. "
                "Received layers that are in shards, or sum over replicas "
                "(`synchronized=True`). Leave that out; for batch statistics try "
                '`batch_norm="deferred"`.'
            )
        if options.may_be_empty:
            raise ValueError(
                "On TPUs the number of examples of a mini-batch must be known, since "
                "XLA compiles for known shapes. Received a mini-batch of any number. "
                "Use `dataset.batch(size, drop_remainder=True)`."
            )

    def _pass(
        self,
        name: str,
        subgraph: SubgraphFunction,
        *,
        more: Sequence[str] = (),
        adds_beside: Sequence[str] | None = None,
    ) -> StageFunction:
        """Makes the function of a pass over a microbatch, compiled if asked for.

        Args:
            name: Its name.
            subgraph: The tensors that it computes.
            more: Names of what it takes beside.
            adds_beside: Names of the tensors that it returns beside accumulators, to
                which it adds gradients; None if it adds none and returns all.
        """
        adds = adds_beside is not None
        fetches = subgraph.fetches if adds_beside is None else adds_beside
        if self._options.compiles_functions:
            subgraph = subgraph.compiled()

        def compute(
            values: NamedTensors, sums: Sequence[tf.Tensor]
        ) -> tuple[NamedTensors, list[tf.Tensor]]:
            made = subgraph.by_name(values)
            return made, self.accumulation.add(sums, made) if adds else list(sums)

        feeds = tuple(dict.fromkeys((*subgraph.feeds, *more)))
        return self._function(name, compute, feeds, fetches, sums=adds)

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
            name: Its name.
            compute: The function to trace.
            feeds: Names of what it takes.
            fetches: Names of what it makes.
            which: Indices that tell it from others of that name.
            rows: True for a function of microbatches, which may be empty.
            sums: True if it takes accumulators.
        """
        feeds, fetches = tuple(feeds), tuple(fetches)
        key = (name, which, self._key)
        if key not in self._cache:
            # The number of rows is an argument only where it matters: a constant one
            # would make TensorFlow compile a copy of the function for every value.
            guards = rows and self._options.may_be_empty
            specs = [tf.TensorSpec((), tf.int32)] if guards else []
            specs += [
                *map(self._trace.spec, feeds),
                *(self.accumulation.specs if sums else ()),
            ]
            guarded = empty_batches.guarded(
                self._trace,
                compute,
                fetches,
                self.accumulation.skip_empty if sums else list,
                always_runs=self._spans_devices,
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

            self._cache[key] = self._make(name, run, specs)
        return StageFunction(feeds, fetches, self._cache[key])

    def _make(
        self,
        name: str,
        run: Callable[..., list[tf.Tensor]],
        specs: Sequence[tf.TensorSpec],
    ) -> DeviceFunction:
        if self._options.compiles_everything:
            run = functions.compiled(run)
        function = functions.trace_function(run, specs, name=f"traced_{name}")
        if self._trace.is_sharded:
            return multi_device.MultiDeviceFunction(
                f"stage_{name}", function, self._cache
            )
        return functions.GraphFunction(f"stage_{name}", function)
