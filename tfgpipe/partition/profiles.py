"""Profiles of a model: costs of its calls, combined into tables of stages."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpipe import remat as remat_lib
from tfgpipe._util import argument_checks, stage_spans, unique
from tfgpipe.capture import CallGraph, TensorKey
from tfgpipe.costs import (
    LayerBytes,
    LayerCost,
    PassCost,
    SegmentProfiler,
    StageBytes,
    StepLoad,
    part_without_room,
    profiler,
    tables,
)
from tfgpipe.devices import sharding
from tfgpipe.remat import Remat
from tfgpipe.runtime import example_tensor
from tfgpipe.schedules import DataFlow, Schedule, SchedulePolicy
from tfgpipe.stage import Boundary, Codec


@dataclasses.dataclass(frozen=True)
class PlanSettings:
    """Options of a plan, beside the model.

    Attributes:
        num_stages: K.
        num_microbatches: M.
        remat: The rematerialisation policy.
        memory_limit: Bytes that a device has, or each, or None.
        num_slots: Optimizer slots a trained weight: 2 for Adam, 1 for momentum.
        codec: Encoding of values between stages.
        schedule: The schedule, which says which stages share a device.
        order: The policy that makes a schedule for the stages, or the schedule.
        speeds: Relative speed of each device; empty for equal ones.
    """

    num_stages: int
    num_microbatches: int
    remat: Remat
    memory_limit: argument_checks.MemoryLimit
    num_slots: int
    codec: Codec
    schedule: Schedule
    order: SchedulePolicy | Schedule
    speeds: tuple[float, ...] = ()

    @functools.cached_property
    def load(self) -> StepLoad:
        """Microbatches that each stage holds and recomputes."""
        return StepLoad.of(self.schedule, self.remat)

    @functools.cached_property
    def memory_limits(self) -> tuple[float, ...]:
        """Bytes that each device has, infinity for no limit."""
        P = self.schedule.num_devices
        return argument_checks.of_each_device(
            "memory_limit", self.memory_limit, P, math.inf
        )

    @property
    def largest_memory(self) -> float | None:
        """Bytes that the largest device has, or None for no limit."""
        return None if self.memory_limit is None else max(self.memory_limits)

    def bytes_in_use(self, p: int) -> float:
        """Returns the bytes that device p has less than the largest."""
        limit = self.memory_limits[p]
        return 0.0 if math.isinf(limit) else max(self.memory_limits) - limit

    def speed(self, k: int) -> float:
        """Returns the speed of the device of stage k."""
        return self.speeds[self.schedule.placement[k]] if self.speeds else 1.0


@dataclasses.dataclass(frozen=True)
class CallProfile:
    """Costs of the calls of a model, for one microbatch.

    Attributes:
        layers: The cost of each call.
        shards: The bytes of each call on each shard's device, `[shard][call]`.
        received_bytes: For all [s, e) the bytes that other stages send to a stage of
            those calls, compressed if they are on their way.
        held_bytes: The bytes of these values after they are decoded, and of the model's
            inputs that the stage reads.
        num_examples: Number of examples of the microbatch.
        flow: The data flow between calls.
        speeds: Speed of each device that layers were timed on, relative to the first.
        sharding: A table of the sharded weights; empty if there is none.
    """

    layers: tuple[LayerCost, ...]
    shards: tuple[tuple[LayerBytes, ...], ...]
    received_bytes: np.ndarray
    held_bytes: np.ndarray
    num_examples: int
    flow: DataFlow
    speeds: tuple[float, ...] = ()
    sharding: str = ""

    def stage_memory_tables(self, settings: PlanSettings) -> Sequence[np.ndarray]:
        """Returns for each stage the bytes of [s, e) on its fullest device.

        What a device has less than the largest counts as in use.
        """
        load, stages = settings.load, self.stage_bytes(settings.remat)

        def memory(key: Any) -> np.ndarray:
            held = load.stage_memory(key[-1], stages, num_slots=settings.num_slots)
            return np.max(held.total, axis=0) + key[0]

        in_use = map(settings.bytes_in_use, settings.schedule.placement)
        each = [*zip(in_use, load.in_flight, load.in_backward, strict=True)]
        return tables.StageTables([(*x, each.index(x)) for x in each], memory)

    def stage_memory(
        self, settings: PlanSettings, k: int, start: int, end: int
    ) -> float:
        """Returns the bytes of stage k of [start, end) on its fullest device."""
        stage = self.stage_bytes(settings.remat).at(start, end)
        held = settings.load.stage_memory(k, stage, num_slots=settings.num_slots)
        return float(np.max(held.total))

    def device_bytes(
        self, settings: PlanSettings, counts: Sequence[int]
    ) -> tuple[float, ...]:
        """Returns the least bytes of each device, of the shard that needs most."""
        stages = self.stage_bytes(settings.remat)
        spans = stage_spans(counts)
        held = settings.load.device_memory(
            [stages.at(span.start, span.stop) for span in spans],
            num_slots=settings.num_slots,
        )
        return tuple(float(np.max(each.total)) for each in held)

    def filled_devices(
        self, settings: PlanSettings, counts: Sequence[int]
    ) -> tuple[tuple[float, float], ...]:
        """Returns the bytes of each device, and the part of passes that is recomputed.

        Of what the policy may recompute, the part for which a device has no memory.
        """
        least = self.device_bytes(settings, counts)
        if not settings.remat.fills_memory:
            return tuple((size, 1.0) for size in least)
        keeping = dataclasses.replace(settings, remat=remat_lib.find("none"))
        most, filled = self.device_bytes(keeping, counts), []
        limits = settings.memory_limits
        if settings.memory_limit is None:
            limits = (max(least),) * len(least)
        for less, more, limit in zip(least, most, limits, strict=True):
            part = part_without_room(less, more, limit)
            filled.append((part * less + (1 - part) * more, part))
        return tuple(filled)

    def stage_bytes(self, remat: Remat) -> StageBytes:
        """Returns the bytes of all stages [s, e), as tables `[T, s, e]`."""
        if remat not in self._stage_bytes:
            self._stage_bytes[remat] = tables.stage_byte_tables(
                self.shards, remat, self.held_bytes
            )
        return self._stage_bytes[remat]

    @functools.cached_property
    def _stage_bytes(self) -> dict[Remat, StageBytes]:
        return {}


def profile_calls(
    graph: CallGraph,
    inputs: Mapping[TensorKey, tf.Tensor | tf.TensorSpec],
    *,
    codec: Codec,
    devices: Sequence[str],
    remat: Remat,
) -> CallProfile:
    """Returns the costs of the calls of a model.

    Args:
        graph: The calls.
        inputs: A microbatch, or its shapes and types alone.
        codec: Encoding of values between stages.
        devices: Devices to measure time on, with noise for inputs of which only the
            shape is known. Layers have the times of the first.
        remat: The rematerialisation policy.
    """
    specs = {key: tf.TensorSpec(x.shape, x.dtype) for key, x in inputs.items()}
    traced = SegmentProfiler(
        graph,
        stage_spans([1] * len(graph.calls)),
        specs,
        remat=remat,
    )
    tensors = {
        key: example_tensor(x, unknown_size=1) if isinstance(x, tf.TensorSpec) else x
        for key, x in (inputs.items() if devices else ())
    }
    seconds = [traced.measure_seconds(tensors, device) for device in devices]
    layers = profiler.layer_costs(graph, traced, seconds[0] if seconds else ())
    shards = _shard_bytes(graph, traced, layers)
    boundary, sizes = Boundary(codec, graph.output_ids), traced.value_bytes()
    called = [call.layer for call in graph.calls]
    return CallProfile(
        layers=tuple(layers),
        shards=tuple(shards),
        received_bytes=graph.received_bytes(
            boundary.encoded_bytes(traced.value_specs())
        ),
        held_bytes=graph.received_bytes(sizes, with_inputs=True),
        num_examples=next(iter(specs.values())).shape[0] or 1,
        flow=graph.flow,
        speeds=_speeds(seconds),
        sharding=sharding.sharding_table(unique(called)),
    )


def _speeds(seconds: Sequence[Sequence[PassCost]]) -> tuple[float, ...]:
    """Returns the speed of each device with all layers, relative to the first."""
    totals = [sum(x.forward + x.backward for x in layers) for layers in seconds]
    return tuple(totals[0] / total if total else 1.0 for total in totals)


def _shard_bytes(
    graph: CallGraph, traced: SegmentProfiler, layers: Sequence[LayerCost]
) -> tuple[tuple[LayerBytes, ...], ...]:
    """Returns the bytes of each call on each shard's device, `[shard][call]`."""
    weights, saved = profiler.call_weights(graph), traced.saved_bytes()
    kept = traced.kept_bytes()
    return tuple(
        tuple(
            LayerBytes(
                weights=weights[i].bytes[t],
                trained=weights[i].trained_bytes[t],
                saved=saved[i][t],
                kept=kept[i][t],
                # Values between layers are on the primary devices.
                inputs=0 if t else x.tensors.inputs,
            )
            for i, x in enumerate(layers)
        )
        for t in range(len(saved[0]))
    )
