"""What each call of a network costs: parameters, FLOPs, bytes, and measured time.

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

from tfgpipe._util import num_bytes
from tfgpipe.capture import CallGraph, TensorKey, layer_variables
from tfgpipe.devices import sharding
from tfgpipe.graph import flops, memory, partitioner
from tfgpipe.runtime import example_variable_value
from tfgpipe.stage import Stage, StageCache, StageOptions, TracedStage, trace_all

# How often a program is run to measure it, after a first time that compiles it.
REPEATS = 8

_OPTIONS = StageOptions(training=True)


@dataclasses.dataclass(frozen=True)
class CallWeights:
    """The weights of a call that no earlier call has.

    Attributes:
        parameters: Numbers in its weights, trained or not.
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


def call_weights(network: CallGraph) -> list[CallWeights]:
    """Returns, for each call, the weights of its layer that no earlier call has."""
    layers = [call.layer for call in network.calls]
    numbers, num_shards = sharding.shard_indices(layers), sharding.num_shards(layers)

    def sizes(variables: Sequence[keras.Variable]) -> tuple[int, ...]:
        found = [0] * num_shards
        for variable in variables:
            found[numbers.get(variable, 0)] += num_bytes(variable)
        return tuple(found)

    seen: set[int] = set()
    results = []
    for call in network.calls:
        new = []
        for variables in layer_variables([call.layer]):
            new.append([v for v in variables if id(v) not in seen])
            seen.update(map(id, variables))
        trained, state = new
        weights = getattr(call.layer, "weights", ())  # Without seeds.
        counted = set(map(id, weights)) & {id(v) for v in (*trained, *state)}
        results.append(
            CallWeights(
                parameters=sum(math.prod(v.shape) for v in weights if id(v) in counted),
                bytes=sizes([*trained, *state]),
                trainable_bytes=sizes(trained),
            )
        )
    return results


class SegmentProfiler:
    """The parts of a network, such as its single calls, each traced by itself.

    Args:
        network: The calls.
        spans: Which calls make each part.
        inputs: Shapes and types of the network's inputs for one microbatch.
    """

    def __init__(
        self,
        network: CallGraph,
        spans: Sequence[slice],
        inputs: Mapping[TensorKey, tf.TensorSpec],
    ) -> None:
        library = StageCache()  # Equal parts share programs, and measurements.
        self._stages = [
            Stage(i, network.segment(span), library) for i, span in enumerate(spans)
        ]
        self._inputs = dict(inputs)
        self._traced = trace_all(
            self._stages,
            inputs,
            [_OPTIONS] * len(self._stages),
            unit="call",
            remark="",
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
        """Counts something in each part's operations, forward and backward."""
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
        """Returns shape and type of each value that goes from part to part."""
        specs = dict(self._inputs)
        for traced in self._traced:
            specs.update(traced.output_specs)
        return {w.value_id: spec for w, spec in specs.items() if not w.is_mask}

    def value_bytes(self) -> dict[int, int]:
        """Returns the bytes of each of them."""
        return {number: num_bytes(spec) for number, spec in self.value_specs().items()}

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
            kept = memory.distinct_buffers(tensors)[len(given) :]
            sizes = [0] * num_shards
            for tensor in kept:
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
            programs = traced.with_remat if recomputes else traced.without_remat
            results.append(memory.peak_bytes(programs.backward.function.graph))
        return results

    def measure_seconds(
        self,
        inputs: Mapping[TensorKey, tf.Tensor],
        device: str,
        progress: Callable[[int], None],
    ) -> list[CallCost]:
        """Runs each part on its own input, forward and backward, and times both.

        Args:
            inputs: One microbatch.
            device: Where to run.
            progress: Called with the number of parts measured so far.
        """
        results = []
        known: dict[tuple[int, int], CallCost] = {}
        values = dict(inputs)
        last_readers = {
            key: i for i, t in enumerate(self._traced) for key in t.input_keys
        }
        with tf.init_scope(), tf.device(device):
            values = {key: tf.identity(x) for key, x in values.items()}
            overhead = _min_seconds(_empty_function(), tf.zeros(()))
            for i, (stage, traced) in enumerate(
                zip(self._stages, self._traced, strict=True)
            ):
                work, made = _measure(stage, traced, values, known, overhead)
                results.append(work)
                values.update(made)
                values = {w: x for w, x in values.items() if last_readers.get(w, 0) > i}
                progress(i + 1)
        return results


def _measure(
    stage: Stage,
    traced: TracedStage,
    values: Mapping[TensorKey, tf.Tensor],
    cache: dict[tuple[int, int], CallCost],
    overhead: float,
) -> tuple[CallCost, dict[TensorKey, tf.Tensor]]:
    """Returns the time of a part, or what is `cache` of its like, and outputs."""
    trace, programs = traced.trace, traced.without_remat
    variables = map(example_variable_value, (*stage.weights, *stage.state))
    feed = dict(zip((*trace.given.weights, *trace.given.state), variables, strict=True))
    feed.update(trace.zeros())
    feed.update(
        zip(trace.given.inputs, (values[w] for w in traced.input_keys), strict=True)
    )
    feed.update(programs.hoisted(programs.forward, feed))
    made, _ = programs.forward(feed)
    feed.update(made)
    for output, gradient in zip(
        trace.forward.outputs, trace.backward.output_grads, strict=True
    ):
        if gradient is not None:
            feed[gradient] = tf.ones_like(feed[output])
    if trace.backward.loss_grad is not None:
        loss_grad = trace.backward.loss_grad
        feed[loss_grad] = tf.ones((), trace.spec(loss_grad).dtype)
    key = (id(programs.forward.function), id(programs.backward.function))
    if key not in cache:
        forward = _min_seconds(programs.forward, feed)
        sums = programs.accumulation.begin()
        backward = 0.0
        if sums or any(trace.backward.input_grads):
            feed.update(programs.hoisted(programs.backward, feed))
            backward = _min_seconds(programs.backward, feed, sums)
        cache[key] = CallCost(
            _subtract_overhead(overhead, forward),
            _subtract_overhead(overhead, backward),
        )
    outputs = (feed[output] for output in trace.forward.outputs)
    return cache[key], dict(zip(traced.output_keys, outputs, strict=True))


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


def _subtract_overhead(overhead: float, seconds: float) -> float:
    """Subtracts the overhead of a call, but keeps at least a tenth."""
    return max(seconds - overhead, seconds / 10)


def _empty_function() -> Callable[..., Any]:
    """Returns a function that does nothing, to measure the overhead of a call."""
    specs = [tf.TensorSpec((), tf.float32)]
    return tf.function(tf.identity, autograph=False).get_concrete_function(*specs)
