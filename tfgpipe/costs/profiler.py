"""Costs of captured calls, counted in their traces or measured by running them.

Every call is traced by itself, forward and gradient, on a microbatch. FLOPs are counted
in that trace, the bytes that a backward needs are the tensors that cross from its
forward to its backward, and time is that of running both. Variables are never touched:
a trace takes their values as arguments.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, num_bytes
from tfgpipe.capture import CallGraph, TensorKey, layer_variables
from tfgpipe.costs.layer_cost import LayerCost, PassCost, TensorBytes, Weights
from tfgpipe.devices import sharding
from tfgpipe.graph import flops, partitioner, peak_memory
from tfgpipe.remat import Remat
from tfgpipe.runtime import example_variable_value
from tfgpipe.stage import (
    Stage,
    StageCache,
    StageFunctions,
    StageOptions,
    TracedStage,
    show_progress,
    trace_all,
)

# How often a function is run to measure it, after a warm-up run.
REPEATS = 8

_OPTIONS = StageOptions(training=True)

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class CallWeights:
    """Weights of a call that no earlier call has.

    Attributes:
        parameters: Number of weights, trained or not.
        bytes: Bytes of the variables on each shard's device.
        trained_bytes: Bytes of the trained ones there.
    """

    parameters: int
    bytes: tuple[int, ...]
    trained_bytes: tuple[int, ...]


def call_weights(graph: CallGraph) -> list[CallWeights]:
    """Returns, for each call, the weights of its layer that no earlier call has."""
    layers = [call.layer for call in graph.calls]
    shards, num_shards = sharding.shard_indices(layers), sharding.num_shards(layers)

    def sizes(variables: Sequence[keras.Variable]) -> tuple[int, ...]:
        totals = [0] * num_shards
        for variable in variables:
            totals[shards.get(variable, 0)] += num_bytes(variable)
        return tuple(totals)

    first_call: IdentityMap[keras.Variable, int] = IdentityMap()
    results = []
    for i, layer in enumerate(layers):
        trained, state = (
            [v for v in variables if first_call.setdefault(v, i) == i]
            for variables in layer_variables([layer])
        )
        weights = getattr(layer, "weights", ())  # Without seeds.
        results.append(
            CallWeights(
                parameters=sum(
                    math.prod(v.shape) for v in weights if first_call.get(v) == i
                ),
                bytes=sizes([*trained, *state]),
                trained_bytes=sizes(trained),
            )
        )
    return results


class SegmentProfiler:
    """Costs of segments of a call graph, each traced by itself.

    Args:
        graph: The calls.
        spans: The calls of each segment, such as a single one.
        inputs: Shapes and types of the graph's inputs for one microbatch.
        options: Options of their traces.
        remat: Policy whose saved results are counted, if it saves some.

    Attributes:
        traced: Each segment, traced.
    """

    def __init__(
        self,
        graph: CallGraph,
        spans: Sequence[slice],
        inputs: Mapping[TensorKey, tf.TensorSpec],
        options: StageOptions = _OPTIONS,
        *,
        remat: Remat | None = None,
    ) -> None:
        cache = StageCache()  # Identical segments share functions, and measurements.
        self._stages = [
            Stage(i, graph.segment(span), cache) for i, span in enumerate(spans)
        ]
        self._inputs = dict(inputs)
        self._saving = remat if remat and remat.saves_results else None
        self.traced = trace_all(
            self._stages, inputs, [options] * len(self._stages), unit="call", remark=""
        )

    def flops(self) -> list[PassCost]:
        """Counts floating point operations; unknown sizes count as one."""
        return self._counted(flops.count)

    def memory_traffic(self) -> list[PassCost]:
        """Counts the bytes that operations, except matrix products, read and write."""
        return self._counted(flops.traffic_bytes)

    def _counted(
        self, count: Callable[[tf.Graph, Collection[str]], float]
    ) -> list[PassCost]:
        """Counts something in each segment's operations, forward and backward."""

        def counted(traced: TracedStage) -> PassCost:
            graph = traced.trace.graph
            inputs = {
                op.name: [x.name for x in op.inputs] for op in graph.get_operations()
            }
            forward = partitioner.subgraph(
                inputs, fetches=traced.trace.forward.outputs, feeds=()
            ).operations
            backward = inputs.keys() - forward
            again = None
            if self._saving:
                again = count(graph, traced.saving(self._saving).recomputed_ops)
            return PassCost(count(graph, forward), count(graph, backward), again)

        return self._of_each_trace(counted)

    def _of_each_trace(self, make: Callable[[TracedStage], Result]) -> list[Result]:
        """Returns a result for each segment; equal ones, which share a trace, once."""
        results: dict[int, Result] = {}
        for traced in self.traced:
            if id(traced.trace) not in results:
                results[id(traced.trace)] = make(traced)
        return [results[id(traced.trace)] for traced in self.traced]

    def value_specs(self) -> dict[int, tf.TensorSpec]:
        """Returns shape and type of each value that goes from segment to segment."""
        specs = dict(self._inputs)
        for traced in self.traced:
            specs.update(traced.output_specs)
        return {key.value_id: x for key, x in specs.items() if not key.is_mask}

    def value_bytes(self) -> dict[int, int]:
        """Returns the bytes of each of them."""
        return {i: num_bytes(spec) for i, spec in self.value_specs().items()}

    def saved_bytes(self) -> list[tuple[int, ...]]:
        """Returns the bytes of the saved tensors that each segment adds.

        These are its outputs and whatever else goes from its forward to its backward,
        on each shard's device.
        """
        return self._buffers(
            lambda x: (*x.without_remat.residuals, *x.trace.forward.outputs)
        )

    def kept_bytes(self) -> list[tuple[int, ...]]:
        """Returns the bytes that each forward saves by the policy, on each shard."""
        return self._buffers(
            lambda x: x.saving(self._saving).residuals if self._saving else ()
        )

    def _buffers(
        self, names_of: Callable[[TracedStage], Sequence[str]]
    ) -> list[tuple[int, ...]]:
        """Returns the bytes of tensors of each segment on each shard's device."""
        num_shards = sharding.num_shards(
            x for stage in self._stages for x in stage.layers
        )

        def total(traced: TracedStage) -> tuple[int, ...]:
            trace = traced.trace
            given = (*trace.given.inputs, *trace.given.weights)
            tensors = map(trace.graph.get_tensor_by_name, (*given, *names_of(traced)))
            sizes = [0] * num_shards
            for tensor in peak_memory.distinct_buffers(tensors)[len(given) :]:
                sizes[trace.shard_index(tensor.name)] += num_bytes(tensor)
            return tuple(sizes)

        return self._of_each_trace(total)

    def workspace_bytes(self, *, recomputes: bool) -> list[int]:
        """Returns the peak workspace of each segment's backward, in bytes."""

        def workspace(traced: TracedStage) -> int:
            functions = traced.with_remat if recomputes else traced.without_remat
            return peak_memory.peak_bytes(functions.backward.function.graph)

        return self._of_each_trace(workspace)

    def step_bytes(self, *, recomputes: bool) -> list[tuple[int, int]]:
        """Returns the bytes of each segment that do not depend on microbatches.

        The first are the gradient accumulators and what is computed once for all
        microbatches, such as padded weights; the second the accumulators, and the most
        that there is beside them as they are made into gradients.

        Args:
            recomputes: True for a backward that recomputes its activations.
        """

        def held(traced: TracedStage) -> tuple[int, int]:
            functions = traced.with_remat if recomputes else traced.without_remat
            feeds = {*functions.forward.feeds, *functions.backward.feeds}
            hoisted = feeds.intersection(functions.hoistable)
            once = sum(num_bytes(traced.trace.spec(name)) for name in hoisted)
            accumulators = sum(map(num_bytes, functions.accumulation.specs))
            made = 0
            if not functions.accumulation.is_final:
                made = peak_memory.peak_bytes(functions.finalize.function.graph)
            return accumulators + once, accumulators + made

        return self._of_each_trace(held)

    def measure_seconds(
        self, inputs: Mapping[TensorKey, tf.Tensor], device: str
    ) -> list[PassCost]:
        """Runs each segment on its own input, forward and backward, and times both."""
        results = []
        cache: dict[tuple[int, int], PassCost] = {}
        last_readers = {
            key: i for i, t in enumerate(self.traced) for key in t.input_keys
        }
        progress = show_progress(
            "timing layer", f"timed {len(self._stages)} layers", len(self._stages)
        )
        with tf.init_scope(), tf.device(device), progress as begin:
            values = {key: tf.identity(x) for key, x in inputs.items()}
            empty = tf.function(tf.identity, autograph=False).get_concrete_function(
                tf.TensorSpec((), tf.float32)
            )
            overhead = _min_seconds(empty, tf.zeros(()))
            for i, (stage, traced) in enumerate(
                zip(self._stages, self.traced, strict=True)
            ):
                begin(i + 1)
                cost, outputs = _measure(stage, traced, values, cache, overhead)
                if self._saving:
                    saving = traced.saving(self._saving)
                    more, _ = _measure(stage, traced, values, cache, overhead, saving)
                    again = max(more.backward - cost.backward, 0.0)
                    # A part of the forward; other load may make it seem more.
                    cost = dataclasses.replace(cost, recompute=min(again, cost.forward))
                results.append(cost)
                values = {
                    key: x
                    for key, x in {**values, **outputs}.items()
                    if last_readers.get(key, 0) > i
                }
        return results


def layer_costs(
    graph: CallGraph, profiler: SegmentProfiler, seconds: Sequence[PassCost] = ()
) -> list[LayerCost]:
    """Returns the cost of each call, for the microbatch that it was traced with."""
    sizes, flops = profiler.value_bytes(), profiler.flops()
    saved, kept = profiler.saved_bytes(), profiler.kept_bytes()
    weights = call_weights(graph)
    starts = may_start([call.layer for call in graph.calls])
    results = []
    for i, call in enumerate(graph.calls):
        size = _weight_bytes(call.layer)
        results.append(
            LayerCost(
                name=call.layer.name,
                weights=Weights(
                    weights[i].parameters, sum(weights[i].trained_bytes) / size, size
                ),
                flops=flops[i],
                seconds=seconds[i] if seconds else PassCost(),
                tensors=TensorBytes(
                    saved=sum(saved[i]),
                    inputs=sum(sizes[n] for n in call.input_ids),
                    # What somebody reads.
                    outputs=sum(sizes.get(n, 0) for n in call.output_ids),
                    kept=sum(kept[i]),
                ),
                may_start=starts[i],
            )
        )
    return results


def may_start(called: Sequence[Any]) -> list[bool]:
    """Returns for each call whether a stage may start with it.

    All calls that use a variable which a step changes belong in one stage.
    """
    allowed = [True] * len(called)
    for _, first, last in shared_state_ranges(called):
        allowed[first + 1 : last + 1] = [False] * (last - first)
    return allowed


def shared_state_ranges(
    called: Sequence[Any],
) -> list[tuple[keras.Variable, int, int]]:
    """Returns variables that steps change, with the first and last of several calls."""
    uses: IdentityMap[keras.Variable, list[int]] = IdentityMap()
    for i, layer in enumerate(called):
        for variable in keras_internals.layers.mutable_state(layer):
            uses.setdefault(variable, []).append(i)
    return [
        (v, calls[0], calls[-1]) for v, calls in uses.items() if calls[0] < calls[-1]
    ]


def _weight_bytes(layer: Any) -> float:
    """Returns the bytes of a weight of a layer, on average."""
    weights = getattr(layer, "weights", ())
    count = sum(math.prod(v.shape) for v in weights)
    return sum(map(num_bytes, weights)) / count if count else 4


def _measure(
    stage: Stage,
    traced: TracedStage,
    values: Mapping[TensorKey, tf.Tensor],
    cache: dict[tuple[int, int], PassCost],
    overhead: float,
    functions: StageFunctions | None = None,
) -> tuple[PassCost, dict[TensorKey, tf.Tensor]]:
    """Returns the time of a segment, from the cache if it is there, and its outputs."""
    trace, functions = traced.trace, functions or traced.without_remat
    variables = map(example_variable_value, stage.variables)
    feed = dict(zip(trace.given.variables, variables, strict=True))
    feed.update(trace.zeros())
    feed.update(
        zip(trace.given.inputs, (values[key] for key in traced.input_keys), strict=True)
    )
    feed.update(functions.hoisted(functions.forward, feed))
    outputs, _ = functions.forward(feed)
    feed.update(outputs)
    for output, gradient in zip(
        trace.forward.outputs, trace.backward.output_grads, strict=True
    ):
        if gradient is not None:
            feed[gradient] = tf.ones_like(feed[output])
    if (loss_grad := trace.backward.loss_grad) is not None:
        spec = trace.spec(loss_grad)
        feed[loss_grad] = tf.ones(spec.shape, spec.dtype)
    key = (id(functions.forward.function), id(functions.backward.function))
    if key not in cache:
        forward = _min_seconds(functions.forward, feed)
        sums = functions.accumulation.begin()
        backward = 0.0
        if sums or any(trace.backward.input_grads):
            feed.update(functions.hoisted(functions.backward, feed))
            backward = _min_seconds(functions.backward, feed, sums)
        # At least a tenth is left when the overhead of a call is subtracted.
        cache[key] = PassCost(*(max(t - overhead, t / 10) for t in (forward, backward)))
    results = (feed[output] for output in trace.forward.outputs)
    return cache[key], dict(zip(traced.output_keys, results, strict=True))


def _min_seconds(function: Callable[..., Any], *args: Any) -> float:
    """Returns the least time of a call in seconds, after a warm-up call.

    Other load on the machine only makes calls slower.
    """
    seconds = []
    for _ in range(REPEATS + 1):
        tf.test.experimental.sync_devices()
        start = time.perf_counter()
        function(*args)
        tf.test.experimental.sync_devices()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
