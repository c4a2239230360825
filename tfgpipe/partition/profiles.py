"""Costs of captured calls, alone and combined into stages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, argument_checks, some_of, stage_spans, unique
from tfgpipe.capture import CallGraph, TensorKey
from tfgpipe.devices import sharding
from tfgpipe.partition import costs
from tfgpipe.partition.costs import CallCost, CallWeights
from tfgpipe.remat import Remat
from tfgpipe.runtime import example_tensor
from tfgpipe.schedules import Schedule
from tfgpipe.stage import BoundaryCodec, TransferDtype

Quantity = Literal["params", "flops", "time", "memory"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)


@dataclasses.dataclass(frozen=True)
class PlanSettings:
    """Options of a plan, beside the model.

    Attributes:
        num_stages: K.
        num_microbatches: M.
        remat: What the backward recomputes.
        memory_limit: Bytes that a device has, or None.
        num_slots: Optimizer slots a trained weight: 2 for Adam, 1 for momentum.
        transfer_dtype: What values are compressed to between stages.
        schedule: The schedule, which says which stages share a device.
    """

    num_stages: int
    num_microbatches: int
    remat: Remat
    memory_limit: float | None
    num_slots: int
    transfer_dtype: TransferDtype | None
    schedule: Schedule

    def recomputed(self, k: int, num_layers: int) -> list[float]:
        """Returns how often stage k computes each layer again, of that many layers.

        The mean over its microbatches.
        """
        share = self.recomputed_microbatches[k] / self.num_microbatches
        each = (self.remat.recomputed(num_layers, kept=kept) for kept in (True, False))
        return [x + share * (y - x) for x, y in zip(*each, strict=True)]

    @property
    def is_additive(self) -> bool:
        """Whether the time of a stage is a sum over its layers, in all stages alike."""
        counts = {x for k in range(self.num_stages) for x in self.recomputed(k, 2)}
        counts.update(self.recomputed(0, 1))
        return len(counts) == 1

    @functools.cached_property
    def recomputed_microbatches(self) -> tuple[float, ...]:
        """For each stage, of how many of its M microbatches the forward saves nothing.

        The backward of these recomputes layers more often: see `Remat.recomputed`.
        """
        M, keeps = self.num_microbatches, self.remat.keeps
        kept = (
            sum(keeps(self.schedule, k, m) for m in range(M))
            for k in range(self.num_stages)
        )
        return tuple(float(M - n) for n in kept)


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Memory of a stage of the calls [s, e), `[T, s, e]` on the device of each shard.

    Attributes:
        resident: Weights, and saved tensors of the microbatches in flight.
        workspace: Workspace, beside that, while it computes.
    """

    resident: np.ndarray
    workspace: np.ndarray

    @functools.cached_property
    def largest(self) -> np.ndarray:
        """The bytes on the device that needs most, `[s, e]`."""
        return np.max(self.resident + self.workspace, axis=0)


@dataclasses.dataclass(frozen=True)
class CallProfile:
    """What the calls of a model cost.

    Attributes:
        names: Names of the layers called.
        weights: The weights that each call adds.
        flops: FLOPs of each call for a microbatch.
        saved_bytes: Bytes that each adds to the saved tensors, on each shard's device.
        input_bytes: Bytes of the inputs of each.
        received_bytes: For all [s, e) the bytes that a stage of those calls receives.
        received_bytes_uncompressed: The bytes of these values after they are decoded.
        may_start: For each call whether a stage may start with it.
        rows: Rows of a microbatch.
        seconds: Time of each call, where it was measured.
        sharding: A table of the sharded weights; empty if there is none.
    """

    names: tuple[str, ...]
    weights: tuple[CallWeights, ...]
    flops: tuple[CallCost, ...]
    saved_bytes: tuple[tuple[int, ...], ...]
    input_bytes: tuple[int, ...]
    received_bytes: np.ndarray
    received_bytes_uncompressed: np.ndarray
    may_start: tuple[bool, ...]
    rows: int
    seconds: tuple[CallCost, ...] = ()
    sharding: str = ""

    @property
    def num_shards(self) -> int:
        """T, the number of devices of a stage."""
        return len(self.saved_bytes[0])

    def call_costs(self, quantity: Quantity, settings: PlanSettings) -> list[float]:
        """Returns the cost of each call, in parameters, FLOPs or seconds.

        Where costs of calls do not add up to those of a stage, see `stage_cost_tables`,
        it is that of a call amid the first stage.
        """
        if quantity == "params":
            return [w.parameters for w in self.weights]
        works = self.seconds if quantity == "time" else self.flops
        again = settings.recomputed(0, 2 * len(works))[0]
        return [(1 + again) * work.forward + work.backward for work in works]

    def stage_cost_tables(
        self, quantity: Quantity, settings: PlanSettings
    ) -> list[np.ndarray]:
        """Returns for each stage the cost of the calls [s, e), at index [s, e].

        Stages that cost the same have the same array.
        """
        if quantity == "memory":
            return self.stage_memory_tables(settings)
        if quantity == "params":
            table = _range_sums(self.call_costs(quantity, settings))
            return [table] * settings.num_stages
        works = self.seconds if quantity == "time" else self.flops
        once = _range_sums([work.forward + work.backward for work in works])
        tables: dict[float, np.ndarray] = {}
        for k, n in enumerate(settings.recomputed_microbatches):
            if n not in tables:
                counts = functools.partial(settings.recomputed, k)
                forward = [work.forward for work in works]
                tables[n] = once + _weighted_range_sums(forward, counts)
        return [tables[n] for n in settings.recomputed_microbatches]

    def stage_memory_tables(self, settings: PlanSettings) -> list[np.ndarray]:
        """Returns for each stage the bytes of [s, e) on its fullest device."""
        return [memory.largest for memory in self.stage_memory(settings)]

    def stage_memory(self, settings: PlanSettings) -> list[StageMemory]:
        """Returns the memory of each stage for the calls [s, e).

        Weights, a gradient and the slots of those that are trained; of the microbatches
        in flight the received values, and what forwards save; and as workspace what
        backwards recompute. A split backward holds that of as many microbatches as have
        begun one.
        """
        copies = 1 + settings.num_slots

        def shard_memory(
            in_flight: int, in_backward: int, t: int
        ) -> tuple[np.ndarray, np.ndarray]:
            weights = _range_sums(
                [w.bytes[t] + copies * w.trainable_bytes[t] for w in self.weights]
            )
            saved = [sizes[t] for sizes in self.saved_bytes]
            # Values between stages are on the primary devices.
            received = 0.0 if t else self.received_bytes_uncompressed
            inputs = [0] * len(saved) if t else self.input_bytes
            kept, again = _activation_tables(settings.remat, saved, inputs)
            return weights + in_flight * (received + kept), in_backward * again

        @functools.cache
        def memory(in_flight: int, in_backward: int) -> StageMemory:
            shards = range(self.num_shards)
            each = [shard_memory(in_flight, in_backward, t) for t in shards]
            return StageMemory(*map(np.array, zip(*each, strict=True)))

        schedule = settings.schedule
        return list(map(memory, schedule.in_flight, schedule.in_backward))


def device_bytes(
    stages: Sequence[StageMemory], schedule: Schedule, counts: Sequence[int]
) -> tuple[float, ...]:
    """Returns the bytes that each device of a schedule needs, of all its stages.

    Args:
        stages: The memory of each stage.
        schedule: Which stages are on which device.
        counts: The number of calls in each stage.
    """
    num_shards = len(stages[0].resident)
    resident = np.zeros((schedule.num_devices, num_shards))
    workspace = np.zeros_like(resident)
    spans = stage_spans(counts)
    for p, stage, span in zip(schedule.placement, stages, spans, strict=True):
        resident[p] += stage.resident[:, span.start, span.stop]
        own = stage.workspace[:, span.start, span.stop]
        workspace[p] = np.maximum(workspace[p], own)
    return tuple(np.max(resident + workspace, axis=1).tolist())


def profile_calls(
    graph: CallGraph,
    inputs: Mapping[TensorKey, tf.Tensor | tf.TensorSpec],
    *,
    transfer_dtype: TransferDtype | None,
    device: str | None,
) -> CallProfile:
    """Returns what the calls of a model cost.

    Args:
        graph: The calls.
        inputs: A microbatch, or its shapes and types alone.
        transfer_dtype: What values are compressed to between stages.
        device: Where to measure time, on noise for inputs of which only the shape is
            known, or None not to.
    """
    specs = {key: tf.TensorSpec(x.shape, x.dtype) for key, x in inputs.items()}
    singles = stage_spans([1] * len(graph.calls))
    traced = costs.SegmentProfiler(graph, singles, specs)
    sizes = traced.value_bytes()
    codec = BoundaryCodec(transfer_dtype, graph.output_ids)
    encoded_sizes = codec.encoded_bytes(traced.value_specs())
    seconds: list[CallCost] = []
    if device is not None:
        tensors = {
            key: example_tensor(x, unknown_size=1)
            if isinstance(x, tf.TensorSpec)
            else x
            for key, x in inputs.items()
        }
        seconds = traced.measure_seconds(tensors, device)
    called = [call.layer for call in graph.calls]
    return CallProfile(
        names=tuple(layer.name for layer in called),
        weights=tuple(costs.call_weights(graph)),
        flops=tuple(traced.flops()),
        saved_bytes=tuple(traced.saved_bytes()),
        input_bytes=tuple(
            sum(sizes[i] for i in call.input_ids) for call in graph.calls
        ),
        received_bytes=graph.received_bytes(encoded_sizes),
        received_bytes_uncompressed=graph.received_bytes(sizes),
        may_start=tuple(may_start(called)),
        rows=next(iter(specs.values())).shape[0] or 1,
        seconds=tuple(seconds),
        sharding=sharding.sharding_table(unique(called)),
    )


def may_start(called: Sequence[Any]) -> list[bool]:
    """Returns for each call whether a stage may start with it.

    All calls that use a variable which a step changes belong in one stage.

    Args:
        called: The layers and operations called, in order.
    """
    allowed = [True] * len(called)
    for _, first, last in _shared_state_ranges(called):
        allowed[first + 1 : last + 1] = [False] * (last - first)
    return allowed


def check_feasible(
    called: Sequence[Any], num_stages: int | None, opaque: Mapping[int, str]
) -> None:
    """Raises ValueError if so many stages cannot be made of these calls.

    Args:
        called: The layers and operations called, in order.
        num_stages: K, or None if it is not known yet.
        opaque: As `CapturedModel.opaque_calls`.
    """
    if num_stages is not None:
        argument_checks.check_count("num_stages", num_stages)
    possible = sum(may_start(called))
    if num_stages is None or num_stages <= possible:
        return
    names = [layer.name for layer in called]
    ranges = sorted(_shared_state_ranges(called), key=lambda span: span[1] - span[2])
    together = "".join(
        f" All calls that use '{variable.path}', which a step changes, are in one "
        f"stage: '{names[first]}' to '{names[last]}'. A layer of its own in each place "
        "would let them be apart."
        for variable, first, last in ranges[:1]
    )
    eager = (
        " No call is of a layer: layers that were called on tensors which no "
        "`keras.Input` leads to ran when the model was made, and are no part of it. "
        "Call them in a layer, or on an input of the model."
    ) * (not any(isinstance(layer, keras.layers.Layer) for layer in called))
    raise ValueError(
        "Every stage holds at least one call of a layer. Received num_stages="
        f"{num_stages} for a model of {len(called)} calls, {some_of(names)}, "
        f"of which at most {possible} stages can be made.{together}"
        f"{_describe_largest_opaque(called, opaque)}{eager} Use "
        f"num_stages={possible}{' or fewer' * (possible > 1)}."
    )


def _describe_largest_opaque(called: Sequence[Any], opaque: Mapping[int, str]) -> str:
    """Says which call hides most layers, and why it does."""
    if not opaque:
        return ""
    sizes = {i: (_num_parameters(called[i]), _num_leaves(called[i])) for i in opaque}
    largest = max(opaque, key=sizes.__getitem__)
    layer, (num_parameters, num_leaves) = called[largest], sizes[largest]
    total = sum(map(_num_parameters, unique(called)))
    share = f" and {num_parameters / total:.0%} of the parameters" if total else ""
    return (
        f" '{layer.name}' ({type(layer).__name__}) holds {num_leaves} layers"
        f"{share} and is one call, since it is {opaque[largest]}: only models are "
        "inlined that do nothing but run the calls that Keras knows. To split it, "
        "give its layers as a list, or write it as a Functional model."
    )


def _num_leaves(layer: Any) -> int:
    """Returns the number of layers inside that have none inside, inputs not counted."""
    inner = keras_internals.inner_layers(layer)
    leaves = [x for x in inner if len(keras_internals.inner_layers(x)) == 1]
    return sum(not isinstance(x, keras.layers.InputLayer) for x in leaves)


def _num_parameters(layer: Any) -> int:
    return sum(math.prod(v.shape) for v in getattr(layer, "weights", ()))


def _shared_state_ranges(
    called: Sequence[Any],
) -> list[tuple[keras.Variable, int, int]]:
    """Returns variables that steps change, with the first and last of several calls."""
    uses: IdentityMap[keras.Variable, list[int]] = IdentityMap()
    for i, layer in enumerate(called):
        for variable in keras_internals.step_state(layer):
            uses.setdefault(variable, []).append(i)
    return [
        (v, calls[0], calls[-1]) for v, calls in uses.items() if calls[0] < calls[-1]
    ]


def _range_sums(each: Sequence[float]) -> np.ndarray:
    """Returns the sum over [s, e) at index [s, e]."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(each, np.float64))])
    return np.triu(sums[None, :] - sums[:, None])


def _weighted_range_sums(
    each: Sequence[float], weights: Callable[[int], Sequence[float]]
) -> np.ndarray:
    """Returns the weighted sum over [s, e) at index [s, e].

    Args:
        each: The terms.
        weights: The weights of a number of terms.
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(each, np.float64))])
    table = np.zeros((len(sums), len(sums)))
    for n in range(1, len(sums)):
        starts = np.arange(len(sums) - n)
        first = 0
        for weight, run in itertools.groupby(weights(n)):
            last = first + len(list(run))
            table[starts, starts + n] += weight * (
                sums[starts + last] - sums[starts + first]
            )
            first = last
    return table


def _activation_tables(
    remat: Remat, activations: Sequence[float], inputs: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what forwards save and backwards recompute, for [s, e) at index [s, e].

    It is `Remat.saved_bytes` and `Remat.recomputed_bytes` for all stages at once; with
    what is recomputed by segments, the input of the first is counted as well.

    Args:
        remat: The policy.
        activations: Bytes that the backward of each call reads.
        inputs: Bytes of the inputs of each call.
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(activations, np.float64))])
    starts_bytes = np.asarray(inputs, np.float64)
    size = len(sums)
    # Of the segments of [s, e): the largest, and the inputs of all but the first.
    largest, heads = np.zeros((size, size)), np.zeros((size, size))
    saved, again = np.zeros((size, size)), np.zeros((size, size))
    for n in range(1, size):
        s = np.arange(size - n)
        length = min(remat.segment(n) or n, n)
        largest[s, s + n] = sums[s + length] - sums[s]
        if length < n:
            rest = s + length
            largest[s, s + n] = np.maximum(largest[s, s + n], largest[rest, s + n])
            heads[s, s + n] = heads[rest, s + n] + starts_bytes[rest]
        if not remat.has_segments(n):
            (saved if remat.keeps_all else again)[s, s + n] = largest[s, s + n]
        elif remat.keeps_all:
            saved[s, s + n], again[s, s + n] = heads[s, s + n], largest[s, s + n]
        else:
            again[s, s + n] = largest[s, s + n] + heads[s, s + n] + starts_bytes[s]
    return saved, again
