"""Costs of the calls of a network, alone and combined into stages."""

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

from tfgpipe import schedules
from tfgpipe._compat import keras_internals
from tfgpipe._util import some_of, stage_spans
from tfgpipe.capture import CallGraph, TensorKey
from tfgpipe.devices import sharding
from tfgpipe.partition import costs
from tfgpipe.partition.costs import CallCost, CallWeights
from tfgpipe.runtime import example_tensor
from tfgpipe.schedules import Schedule
from tfgpipe.simulation import recompute_counts
from tfgpipe.stage import BoundaryCodec, Remat, TransferDtype

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
        transfer_dtype: What values are compressed to on their way.
        schedule: The order of actions, and which stages share a device. None for
            GPipe's, a device for each stage.
    """

    num_stages: int
    num_microbatches: int
    remat: Remat
    memory_limit: float | None = None
    num_slots: int = 2
    transfer_dtype: TransferDtype | None = None
    schedule: Schedule | None = None

    @functools.cached_property
    def resolved_schedule(self) -> Schedule:
        """The schedule."""
        return self.schedule or schedules.gpipe(self.num_stages, self.num_microbatches)

    @functools.cached_property
    def recomputed_microbatches(self) -> tuple[float, ...]:
        """For each stage, of how many of its M microbatches it recomputes the forward.

        Of one that is recomputed `"layer"` may compute layers more than once.
        """
        K, M, order = self.num_stages, self.num_microbatches, self.resolved_schedule
        if self.remat != "except_last":
            return (0.0 if self.remat == "none" else M,) * K
        kept = [
            sum(order.backward_follows_immediately(k, m) for m in range(M))
            for k in range(K)
        ]
        return tuple(float(M - count) for count in kept)


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Memory of a stage of the calls [s, e), `[T, s, e]` on the device of each shard.

    Attributes:
        resident: Weights, and saved tensors of the microbatches in flight.
        workspace: Workspace, beside that, while it computes.
    """

    resident: np.ndarray
    workspace: np.ndarray


@dataclasses.dataclass(frozen=True)
class CallProfile:
    """What the calls of a network cost.

    Attributes:
        names: Names of the layers called.
        weights: What each call brings.
        flops: What each call does for a microbatch.
        saved_bytes: Bytes each adds to what a backward needs, on each shard's device.
        input_bytes: Bytes that each reads.
        received_bytes: For all [s, e) the bytes that a stage of those calls receives.
        received_bytes_uncompressed: The bytes of these values after they are decoded.
        may_start: For each call whether a stage may start with it.
        rows: Rows of a microbatch.
        seconds: What each call takes, where it was measured.
        sharding: A table of the weights that are in parts; empty if there is none.
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
        again = settings.recomputed_microbatches[0] / settings.num_microbatches
        if settings.remat == "layer":
            again, _ = recompute_counts("layer", 2)
        works = self.seconds if quantity == "time" else self.flops
        return [(1 + again) * work.forward + work.backward for work in works]

    def stage_cost_tables(
        self, quantity: Quantity, settings: PlanSettings
    ) -> list[np.ndarray]:
        """Returns for each stage what it costs of the calls [s, e), at index [s, e].

        Stages that cost the same have the same array.
        """
        K, M = settings.num_stages, settings.num_microbatches
        if quantity == "memory":
            return self.stage_memory_tables(settings)
        if quantity == "params":
            return [_range_sums(self.call_costs(quantity, settings))] * K
        works = self.seconds if quantity == "time" else self.flops
        once = _range_sums([work.forward + work.backward for work in works])
        forward = _range_sums([work.forward for work in works])
        if settings.remat == "layer":
            amid, at_end = recompute_counts("layer", 2)
            last = np.array([0.0, *(work.forward for work in works)])  # [e]
            return [once + amid * forward + np.triu((at_end - amid) * last, 1)] * K
        made = {n: once + n / M * forward for n in settings.recomputed_microbatches}
        return [made[n] for n in settings.recomputed_microbatches]

    def stage_memory_tables(self, settings: PlanSettings) -> list[np.ndarray]:
        """Returns for each stage the bytes that it needs of the calls [s, e).

        In shards it is what the device needs that needs most.
        """
        made: dict[int, np.ndarray] = {}
        parts = self.stage_memory(settings)
        for part in parts:
            if id(part) not in made:
                made[id(part)] = np.max(part.resident + part.workspace, axis=0)
        return [made[id(part)] for part in parts]

    def stage_memory(self, settings: PlanSettings) -> list[StageMemory]:
        """Returns for each stage what it holds of the calls [s, e).

        Weights, a gradient and the slots of those that are trained, and activations: of
        the microbatches in flight without rematerialisation; with it, what each of
        these received and, while it computes, the activations of one microbatch, of one
        call at a time for `"layer"`. A backward in two halves holds those of as many
        microbatches as have begun one.
        """
        order = settings.resolved_schedule
        made: dict[tuple[int, int], StageMemory] = {}
        counts = list(zip(order.in_flight, order.in_backward, strict=True))
        for each in counts:
            if each not in made:
                parts = [
                    self._bytes(settings, *each, t) for t in range(self.num_shards)
                ]
                held, working = zip(*parts, strict=True)
                made[each] = StageMemory(np.array(held), np.array(working))
        return [made[each] for each in counts]

    def device_bytes(
        self, settings: PlanSettings, counts: Sequence[int]
    ) -> tuple[float, ...]:
        """Returns the bytes that each device needs, of all its stages.

        What each stage holds, and while one computes what that takes.

        Args:
            settings: What for.
            counts: The number of calls in each stage.
        """
        return device_bytes(
            self.stage_memory(settings), settings.resolved_schedule, counts
        )

    def _bytes(
        self, settings: PlanSettings, in_flight: int, in_backward: int, shard: int
    ) -> tuple[np.ndarray, np.ndarray]:
        copies = 1 + settings.num_slots
        held = _range_sums(
            [w.bytes[shard] + copies * w.trainable_bytes[shard] for w in self.weights]
        )
        kept = [sizes[shard] for sizes in self.saved_bytes]
        # What goes from stage to stage goes from lead to lead.
        arrived, reads = (
            (self.received_bytes_uncompressed, _range_sums(self.input_bytes))
            if shard == 0
            else (0.0, 0.0)
        )
        if settings.remat == "none":
            held = held + in_flight * (arrived + _range_sums(kept))
            return held, np.zeros_like(held)
        working = _range_sums(kept)
        if settings.remat == "layer":
            working = reads + _range_maxima(kept)
        return held + in_flight * arrived, in_backward * working


def device_bytes(
    stages: Sequence[StageMemory], schedule: Schedule, counts: Sequence[int]
) -> tuple[float, ...]:
    """Returns the bytes that each device of a schedule needs, of all its stages.

    Args:
        stages: What each stage holds.
        schedule: Which stages are on which device.
        counts: The number of calls in each stage.
    """
    held: list[Any] = [0.0] * schedule.num_devices
    working: list[Any] = [0.0] * schedule.num_devices
    spans = stage_spans(counts)
    for p, stage, span in zip(schedule.placement, stages, spans, strict=True):
        held[p] = held[p] + stage.resident[:, span.start, span.stop]  # [T]
        mine = stage.workspace[:, span.start, span.stop]  # [T]
        working[p] = np.maximum(working[p], mine)
    return tuple(float(np.max(a + b)) for a, b in zip(held, working, strict=True))


def profile_calls(
    network: CallGraph,
    inputs: Mapping[TensorKey, tf.Tensor | tf.TensorSpec],
    *,
    transfer_dtype: TransferDtype | None = None,
    device: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> CallProfile:
    """Returns what the calls of a network cost.

    Args:
        network: The calls.
        inputs: A microbatch, or its shapes and types alone.
        transfer_dtype: What values are compressed to on their way.
        device: Where to measure time, or None not to. Noise stands in for tensors that
            are not given.
        progress: Called with the number of calls measured so far.
    """
    specs = {key: tf.TensorSpec(x.shape, x.dtype) for key, x in inputs.items()}
    singles = stage_spans([1] * len(network.calls))
    traced = costs.SegmentProfiler(network, singles, specs)
    sizes = traced.value_bytes()
    sent = BoundaryCodec(transfer_dtype, network.output_ids).encoded_bytes(
        traced.value_specs()
    )
    seconds: list[CallCost] = []
    if device is not None:
        tensors = {
            key: example_tensor(x, unknown_size=1)
            if isinstance(x, tf.TensorSpec)
            else x
            for key, x in inputs.items()
        }
        seconds = traced.measure_seconds(
            tensors, device, progress or (lambda count: None)
        )
    return CallProfile(
        names=tuple(call.layer.name for call in network.calls),
        weights=tuple(costs.call_weights(network)),
        flops=tuple(traced.flops()),
        saved_bytes=tuple(traced.saved_bytes()),
        input_bytes=tuple(
            sum(sizes[n] for n in call.input_ids) for call in network.calls
        ),
        received_bytes=np.array(network.received_bytes(sent)),
        received_bytes_uncompressed=np.array(network.received_bytes(sizes)),
        may_start=tuple(may_start(network)),
        rows=next(iter(specs.values())).shape[0] or 1,
        seconds=tuple(seconds),
        sharding=sharding.sharding_table(
            {id(c.layer): c.layer for c in network.calls}.values()
        ),
    )


def may_start(network: CallGraph) -> list[bool]:
    """Returns for each call whether a stage may start with it.

    All calls that use a variable which a step changes belong in one stage.
    """
    return _may_start([call.layer for call in network.calls])


def check_feasible(
    called: Sequence[Any], num_stages: int | None, opaque: Mapping[int, str]
) -> None:
    """Raises ValueError if so many stages cannot be made of these calls.

    Args:
        called: The layers and operations called, in order.
        num_stages: K, or None for a number that is not known yet.
        opaque: As `CapturedModel.opaque_calls`.
    """
    possible = sum(_may_start(called))
    if num_stages is None or 1 <= num_stages <= possible:
        return
    names = [layer.name for layer in called]
    held = sorted(_shared_state_ranges(called), key=lambda span: span[1] - span[2])
    together = "".join(
        f" All calls that use '{variable.path}', which a step changes, are in one "
        f"stage: '{names[first]}' to '{names[last]}'. A layer of its own in each place "
        "would let them be apart."
        for variable, first, last in held[:1]
    )
    raise ValueError(
        "Every stage holds at least one call of a layer. Received num_stages="
        f"{num_stages} for a model of {len(called)} calls, {some_of(names)}, "
        f"of which at most {possible} stages can be made.{together}"
        f"{_describe_largest_opaque(called, opaque)} Use num_stages={possible} or "
        "fewer."
    )


def _describe_largest_opaque(called: Sequence[Any], closed: Mapping[int, str]) -> str:
    """Says which call hides most layers, and why it does."""
    if not closed:
        return ""
    sizes = {i: _num_parameters(called[i]) for i in closed}
    inside = {i: _num_leaves(called[i]) for i in closed}
    largest = max(closed, key=lambda i: (sizes[i], inside[i]))
    layer = called[largest]
    whole = sum(_num_parameters(x) for x in {id(x): x for x in called}.values())
    share = f" and {sizes[largest] / whole:.0%} of the parameters" if whole else ""
    return (
        f" '{layer.name}' ({type(layer).__name__}) holds {inside[largest]} layers"
        f"{share} and is one call, since it is {closed[largest]}: only models are "
        "opened that do nothing but run the calls that Keras knows. To cut inside, "
        "give its layers as a list, or write it as a Functional model."
    )


def _num_leaves(layer: Any) -> int:
    """Returns the number of layers inside that have none inside, inputs not counted."""
    inner = keras_internals.inner_layers(layer)
    leaves = [x for x in inner if len(keras_internals.inner_layers(x)) == 1]
    return sum(not isinstance(x, keras.layers.InputLayer) for x in leaves)


def _num_parameters(layer: Any) -> int:
    return sum(math.prod(v.shape) for v in getattr(layer, "weights", ()))


def _may_start(called: Sequence[Any]) -> list[bool]:
    allowed = [True] * len(called)
    for _, first, last in _shared_state_ranges(called):
        allowed[first + 1 : last + 1] = [False] * (last - first)
    return allowed


def _shared_state_ranges(
    called: Sequence[Any],
) -> list[tuple[keras.Variable, int, int]]:
    """Returns variables that steps change, with the first and last of several calls."""
    uses: dict[int, list[int]] = {}
    variables: dict[int, keras.Variable] = {}
    for position, layer in enumerate(called):
        for variable in keras_internals.step_state(layer):
            variables[id(variable)] = variable
            uses.setdefault(id(variable), []).append(position)
    return [
        (variables[key], min(places), max(places))
        for key, places in uses.items()
        if min(places) < max(places)
    ]


def _range_sums(each: Sequence[float]) -> np.ndarray:
    """Returns the sum over [s, e) at index [s, e]."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(each, np.float64))])
    return np.triu(sums[None, :] - sums[:, None])


def _range_maxima(each: Sequence[float]) -> np.ndarray:
    """Returns the maximum over [s, e) at index [s, e]."""
    table = np.zeros((len(each) + 1, len(each) + 1))
    for start in range(len(each)):
        table[start, start + 1 :] = list(itertools.accumulate(each[start:], max))
    return table
