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
from tfgpipe.capture import Network, Wire, layer_variables
from tfgpipe.devices import sharding
from tfgpipe.graph import flops, memory, partitioner
from tfgpipe.runtime import example_variable_value
from tfgpipe.stage import Stage, StageCache, StageOptions, TracedStage, trace_all

# How often a program is run to measure it, after a first time that compiles it.
REPEATS = 8

_OPTIONS = StageOptions(training=True)


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a call that no earlier call has.

    Attributes:
        parameters: Numbers in its weights, trained or not.
        bytes: Their size on each shard's device.
        trained_bytes: The size there of those that are trained.
    """

    parameters: int
    bytes: tuple[int, ...]
    trained_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Work:
    """Cost of a segment for one microbatch, in FLOPs or seconds.

    Attributes:
        forward: In the forward.
        backward: In the backward, without recomputation.
    """

    forward: float
    backward: float


def call_weights(network: Network) -> list[Weights]:
    """Returns, for each call, the weights of its layer that no earlier call has."""
    layers = [call.layer for call in network.calls]
    numbers, num_shards = sharding.numbers(layers), sharding.count(layers)

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
            Weights(
                parameters=sum(math.prod(v.shape) for v in weights if id(v) in counted),
                bytes=sizes([*trained, *state]),
                trained_bytes=sizes(trained),
            )
        )
    return results


class TracedParts:
    """The parts of a network, such as its single calls, each traced by itself.

    Args:
        network: The calls.
        spans: Which calls make each part.
        inputs: Shapes and types of the network's inputs for one microbatch.
    """

    def __init__(
        self,
        network: Network,
        spans: Sequence[slice],
        inputs: Mapping[Wire, tf.TensorSpec],
    ) -> None:
        library = StageCache()  # Equal parts share programs, and measurements.
        self._stages = [
            Stage(i, network.part(span), library) for i, span in enumerate(spans)
        ]
        self._inputs = dict(inputs)
        self._traced = trace_all(
            self._stages,
            inputs,
            [_OPTIONS] * len(self._stages),
            unit="call",
            remark="",
        )

    def flops(self) -> list[Work]:
        """Counts floating point operations; unknown sizes count as one."""
        return self._counted(flops.count)

    def traffic(self) -> list[Work]:
        """Counts the bytes that operations, except matrix products, read and write."""
        return self._counted(flops.traffic)

    def _counted(
        self, count: Callable[[tf.Graph, Collection[str]], float]
    ) -> list[Work]:
        """Counts something in each part's operations, forward and backward."""
        results = []
        for traced in self._traced:
            graph = traced.trace.graph
            everything = {op.name for op in graph.get_operations()}
            inputs = {
                op.name: [x.name for x in op.inputs] for op in graph.get_operations()
            }
            forward = partitioner.program(
                inputs, fetches=traced.trace.forward.outputs, feeds=()
            ).operations
            results.append(
                Work(
                    forward=count(graph, forward),
                    backward=count(graph, everything - forward),
                )
            )
        return results

    def values(self) -> dict[int, tf.TensorSpec]:
        """Returns shape and type of each value that goes from part to part."""
        specs = dict(self._inputs)
        for traced in self._traced:
            specs.update(traced.output_specs)
        return {w.number: spec for w, spec in specs.items() if not w.is_mask}

    def sizes(self) -> dict[int, int]:
        """Returns the bytes of each of them."""
        return {number: num_bytes(spec) for number, spec in self.values().items()}

    def kept_bytes(self) -> list[tuple[int, ...]]:
        """Returns the bytes of the saved tensors that each segment adds.

        These are its outputs and whatever else goes from its forward to its backward,
        on each shard's device.
        """
        num_shards = sharding.count(x for stage in self._stages for x in stage.layers)
        results = []
        for traced in self._traced:
            trace = traced.trace
            given = (*trace.given.inputs, *trace.given.weights)
            names = (*given, *traced.saving.residuals, *trace.forward.outputs)
            tensors = map(trace.graph.get_tensor_by_name, names)
            kept = memory.buffers(tensors)[len(given) :]
            sizes = [0] * num_shards
            for tensor in kept:
                sizes[trace.shard(tensor.name)] += num_bytes(tensor)
            results.append(tuple(sizes))
        return results

    def workspace_bytes(self, *, recomputes: bool) -> list[int]:
        """Returns the peak workspace of each segment's backward, in bytes.

        Args:
            recomputes: Whether the backward recomputes its activations.
        """
        results = []
        for traced in self._traced:
            programs = traced.recomputing if recomputes else traced.saving
            results.append(memory.peak_bytes(programs.backward.function.graph))
        return results

    def seconds(
        self,
        inputs: Mapping[Wire, tf.Tensor],
        device: str,
        progress: Callable[[int], None],
    ) -> list[Work]:
        """Runs each part on its own input, forward and backward, and times both.

        Args:
            inputs: One microbatch.
            device: Where to run.
            progress: Called with the number of parts measured so far.
        """
        results = []
        known: dict[tuple[int, int], Work] = {}
        values = dict(inputs)
        last_readers = {wire: i for i, t in enumerate(self._traced) for wire in t.reads}
        with tf.init_scope(), tf.device(device):
            values = {wire: tf.identity(x) for wire, x in values.items()}
            overhead = _fastest(_nothing(), tf.zeros(()))
            for i, (stage, traced) in enumerate(
                zip(self._stages, self._traced, strict=True)
            ):
                work, made = _measured(stage, traced, values, known, overhead)
                results.append(work)
                values.update(made)
                values = {w: x for w, x in values.items() if last_readers.get(w, 0) > i}
                progress(i + 1)
        return results


def _measured(
    stage: Stage,
    traced: TracedStage,
    values: Mapping[Wire, tf.Tensor],
    known: dict[tuple[int, int], Work],
    overhead: float,
) -> tuple[Work, dict[Wire, tf.Tensor]]:
    """Returns the time of a part, or what is `known` of its like, and outputs."""
    trace, programs = traced.trace, traced.saving
    variables = map(example_variable_value, (*stage.weights, *stage.state))
    feed = dict(zip((*trace.given.weights, *trace.given.state), variables, strict=True))
    feed.update(trace.zeros())
    feed.update(zip(trace.given.inputs, (values[w] for w in traced.reads), strict=True))
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
    if key not in known:
        forward = _fastest(programs.forward, feed)
        sums = programs.sums.begin()
        backward = 0.0
        if sums or any(trace.backward.input_grads):
            feed.update(programs.hoisted(programs.backward, feed))
            backward = _fastest(programs.backward, feed, sums)
        known[key] = Work(_without(overhead, forward), _without(overhead, backward))
    outputs = (feed[output] for output in trace.forward.outputs)
    return known[key], dict(zip(traced.makes, outputs, strict=True))


def _fastest(function: Callable[..., Any], *args: Any) -> float:
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


def _without(overhead: float, seconds: float) -> float:
    """Subtracts the overhead of a call, but keeps at least a tenth."""
    return max(seconds - overhead, seconds / 10)


def _nothing() -> Callable[..., Any]:
    """Returns a function that does nothing, to measure the overhead of a call."""
    specs = [tf.TensorSpec((), tf.float32)]
    return tf.function(tf.identity, autograph=False).get_concrete_function(*specs)
