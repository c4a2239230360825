"""The memory of devices that are not there, by the law of `tfgpipe.costs`.

Of recomputed tensors and workspace a compiler leaves the device's `temp_factor`, if the
layers were counted operation by operation. Where backwards are split, another function
takes the recomputed tensors, which are then left as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfgpipe import remat
from tfgpipe.costs import (
    LayerBytes,
    LayerCost,
    Memory,
    StageBytes,
    part_without_room,
    stage_bytes,
)
from tfgpipe.planner.devices import Device
from tfgpipe.planner.shard_axes import UNITS, ShardAxis
from tfgpipe.planner.workload import StagedWorkload


def layer_bytes(
    layer: LayerCost,
    *,
    examples: float,
    num_shards: int,
    dtype: str,
    axis: ShardAxis = UNITS,
    temp_factor: float = 1.0,
) -> LayerBytes:
    """Returns the bytes of a layer on the first of T devices, which has most."""
    weights, tensors = layer.weights, layer.tensors
    T, parts = axis.parts(layer, num_shards), axis.weight_parts(layer, num_shards)
    fraction = axis.saved_fraction(layer, num_shards)
    return LayerBytes(
        weights=(weights.bytes + weights.copy_bytes(dtype)) / parts,
        trained=weights.trained_bytes / parts,
        saved=examples * tensors.saved * fraction,
        inputs=examples * tensors.inputs,
        received=examples * tensors.boundary,
        # With the gradient that it adds to the sum.
        workspace=temp_factor * examples * tensors.workspace / T
        + weights.trained_bytes / parts,
        saves_inputs=tensors.saves_inputs,
        kept=examples * tensors.kept * fraction,
    )


def devices(staged: StagedWorkload) -> tuple[Memory, ...]:
    """Returns the memory of each device of a pipeline."""
    if not staged.config.remat.fills_memory:
        return _devices(staged)
    return tuple(memory for memory, _ in _filled_devices(staged))


def recomputed_parts(staged: StagedWorkload) -> list[float]:
    """Returns for each device the part of activations that its backwards recompute.

    Of what the policy may recompute, the part for which a device has no memory.
    """
    if not staged.config.remat.fills_memory:
        return [1.0] * len(staged.devices)
    return [part for _, part in _filled_devices(staged)]


def _filled_devices(staged: StagedWorkload) -> list[tuple[Memory, float]]:
    """Returns the memory of each device that it fills, and the part that is left."""
    config = dataclasses.replace(staged.config, remat=remat.find("none"))
    keeping = dataclasses.replace(staged, config=config)
    filled = []
    for less, more, device in zip(
        _devices(staged), _devices(keeping), staged.devices, strict=True
    ):
        part = part_without_room(less.total, more.total, device.memory)
        filled.append((less.between(more, part), part))
    return filled


def _devices(staged: StagedWorkload) -> tuple[Memory, ...]:
    """Returns the memory of each device if all is recomputed that the policy may."""
    load = staged.config.load
    each = stages(staged, splits_backwards=load.splits_backwards)
    held = load.device_memory(each, num_slots=staged.num_slots)
    return tuple(
        dataclasses.replace(
            _in_slices(memory, [each[k] for k in staged.config.stages_on(p)], staged),
            reserved=device.reserved,
        )
        for p, (memory, device) in enumerate(zip(held, staged.devices, strict=True))
    )


def _in_slices(
    held: Memory, stages: Sequence[StageBytes], staged: StagedWorkload
) -> Memory:
    """Returns the memory of a device with the weights of its stages in slices.

    Whole are those of two stages at a time, one of which is gathered while the device
    works on the other, and their gradients.
    """
    share = staged.config.weight_share
    if share == 1:
        return held

    def bytes_of(sizes: Sequence[float]) -> float:
        return share * sum(sizes) + (1 - share) * sum(sorted(sizes)[-2:])

    return dataclasses.replace(
        held,
        weights=bytes_of([stage.weights for stage in stages]),
        gradients=bytes_of([stage.trained for stage in stages]),
    )


def stages(staged: StagedWorkload, *, splits_backwards: bool) -> list[StageBytes]:
    """Returns the bytes of each stage."""
    workload, config = staged.workload, staged.config

    def stage(layers: Sequence[LayerCost], device: Device) -> StageBytes:
        temp_factor = device.temp_factor if workload.traced else 1.0
        each = [
            layer_bytes(
                layer,
                examples=staged.examples,
                num_shards=config.num_shards,
                axis=config.shard_axis,
                dtype=workload.dtype,
                temp_factor=temp_factor,
            )
            for layer in layers
        ]
        return stage_bytes(
            each, config.remat, temp_factor=1.0 if splits_backwards else temp_factor
        )

    return [*map(stage, staged.stages, staged.placed_on)]
