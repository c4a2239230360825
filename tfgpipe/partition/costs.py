"""What each captured call costs: parameters, FLOPs, bytes, and measured time.

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
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._util import IdentityMap, num_bytes
from tfgpipe.capture import CallGraph, TensorKey, layer_variables
from tfgpipe.devices import sharding
from tfgpipe.graph import flops, memory, partitioner
from tfgpipe.runtime import example_variable_value
from tfgpipe.stage import Stage, StageCache, StageOptions, TracedStage, trace_all

# How often a function is run to measure it, after a warm-up run.
REPEATS = 8

_OPTIONS = StageOptions(training=True)


@dataclasses.dataclass(frozen=True)
class CallWeights:
    """The weights of a call that no earlier call has.

    Attributes:
        parameters: How many parameters they have, trained or not.
        bytes: Their size on each shard's device.
        trainable_bytes: The size there of those that are trained.
    """

    parameters: int
    bytes: tuple[int, ...]
    trainable_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CallCost:
    """Cost of a segment for one microbatch, in FLOPs or seconds.

    Attributes:
        forward: In the forward.
        backward: In the backward, without recomputation.
    """

    forward: float
    backward: float


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
                trainable_bytes=sizes(trained),
            )
        )
    return results


class SegmentProfiler:
    """Segments of a call graph, such as its single calls, each traced by itself.

    Args:
        graph: The calls.
        spans: Which calls each segment has.
        inputs: Shapes and types of the graph's inputs for one microbatch.
        options: How they are traced.
    """

    def __init__(
        self,
        graph: CallGraph,
        spans: Sequence[slice],
        inputs: Mapping[TensorKey, tf.TensorSpec],
        options: StageOptions = _OPTIONS,
    ) -> None:
        cache = StageCache()  # Identical segments share functions, and measurements.
        self._stages = [
            Stage(i, graph.segment(span), cache) for i, span in enumerate(spans)
        ]
        self._inputs = dict(inputs)
        self._traced = trace_all(
            self._stages, inputs, [options] * len(self._stages), unit="call", remark=""
        )

    def flops(self) -> list[CallCost]:
        """Counts floating point operations; unknown sizes count as one."""
        return self._counted(flops.count)

    def memory_traffic(self) -> list[CallCost]:
        """Counts the bytes that operations, except matrix products, read and write."""
        return self._counted(flops.traffic_bytes)

    def _counted(
        self, count: Callable[[tf.Graph, Collection[str]], float]
    ) -> list[CallCost]:
        """Counts something in each segment's operations, forward and backward."""
        results = []
        for traced in self._traced:
            graph = traced.trace.graph
            everything = {op.name for op in graph.get_operations()}
            inputs = {
                op.name: [x.name for x in op.inputs] for op in graph.get_operations()
            }
            forward = partitioner.subgraph(
                inputs, fetches=traced.trace.forward.outputs, feeds=()
            ).operations
            results.append(
                CallCost(
                    forward=count(graph, forward),
                    backward=count(graph, everything - forward),
                )
            )
        return results

    def value_specs(self) -> dict[int, tf.TensorSpec]:
        """Returns shape and type of each value that goes from segment to segment."""
        specs = dict(self._inputs)
        for traced in self._traced:
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
        num_shards = sharding.num_shards(
            x for stage in self._stages for x in stage.layers
        )
        results = []
        for traced in self._traced:
            trace = traced.trace
            given = (*trace.given.inputs, *trace.given.weights)
            names = (*given, *traced.without_remat.residuals, *trace.forward.outputs)
            tensors = map(trace.graph.get_tensor_by_name, names)
            sizes = [0] * num_shards
            for tensor in memory.distinct_buffers(tensors)[len(given) :]:
                sizes[trace.shard_index(tensor.name)] += num_bytes(tensor)
            results.append(tuple(sizes))
        return results

    def workspace_bytes(self, *, recomputes: bool) -> list[int]:
        """Returns the peak workspace of each segment's backward, in bytes.

        Args:
            recomputes: Whether the backward recomputes its activations.
        """
        results = []
        for traced in self._traced:
            functions = traced.with_remat if recomputes else traced.without_remat
            results.append(memory.peak_bytes(functions.backward.function.graph))
        return results

    def step_bytes(self, *, recomputes: bool) -> list[tuple[int, int]]:
        """Returns the bytes that each segment holds whatever is in flight.

        The first are the gradient accumulators and what is computed once for all
        microbatches, such as padded weights; the second the accumulators, and the most
        that there is beside them as they are made into gradients.

        Args:
            recomputes: Whether the backward recomputes its activations.
        """
        results = []
        for traced in self._traced:
            functions = traced.with_remat if recomputes else traced.without_remat
            feeds = {*functions.forward.feeds, *functions.backward.feeds}
            hoisted = feeds.intersection(functions.hoistable)
            once = sum(num_bytes(traced.trace.spec(name)) for name in hoisted)
            held = sum(map(num_bytes, functions.accumulation.specs))
            made = 0
            if not functions.accumulation.is_final:
                made = memory.peak_bytes(functions.finalize.function.graph)
            results.append((held + once, held + made))
        return results

    def measure_seconds(
        self, inputs: Mapping[TensorKey, tf.Tensor], device: str
    ) -> list[CallCost]:
        """Runs each segment on its own input, forward and backward, and times both.

        Args:
            inputs: One microbatch.
            device: Where to run.
        """
        results = []
        cache: dict[tuple[int, int], CallCost] = {}
        last_readers = {
            key: i for i, t in enumerate(self._traced) for key in t.input_keys
        }
        progress = keras.utils.Progbar(len(self._stages), unit_name="layer")
        with tf.init_scope(), tf.device(device):
            values = {key: tf.identity(x) for key, x in inputs.items()}
            empty = tf.function(tf.identity, autograph=False).get_concrete_function(
                tf.TensorSpec((), tf.float32)
            )
            overhead = _min_seconds(empty, tf.zeros(()))
            for i, (stage, traced) in enumerate(
                zip(self._stages, self._traced, strict=True)
            ):
                cost, outputs = _measure(stage, traced, values, cache, overhead)
                results.append(cost)
                values = {
                    key: x
                    for key, x in {**values, **outputs}.items()
                    if last_readers.get(key, 0) > i
                }
                progress.update(i + 1)
        return results


def _measure(
    stage: Stage,
    traced: TracedStage,
    values: Mapping[TensorKey, tf.Tensor],
    cache: dict[tuple[int, int], CallCost],
    overhead: float,
) -> tuple[CallCost, dict[TensorKey, tf.Tensor]]:
    """Returns the time of a segment, from the cache if it is there, and its outputs."""
    trace, functions = traced.trace, traced.without_remat
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
        cache[key] = CallCost(*(max(t - overhead, t / 10) for t in (forward, backward)))
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
