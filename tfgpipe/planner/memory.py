"""The memory of devices that are not there, by the law of `tfgpipe.costs`.

Of recomputed tensors and workspace a compiler leaves the device's `temp_factor`, if the
layers were counted operation by operation. Where backwards are split, another function
takes the recomputed tensors, which are then left as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgpipe._util import stage_spans
from tfgpipe.costs import LayerBytes, LayerCost, Memory, stage_bytes
from tfgpipe.planner.devices import Device
from tfgpipe.planner.parallel_config import ParallelConfig
from tfgpipe.planner.workload import Workload


def layer_bytes(
    layer: LayerCost,
    *,
    examples: float,
    num_shards: int,
    dtype: str,
    temp_factor: float = 1.0,
) -> LayerBytes:
    """Returns the bytes of a layer on one device."""
    T, weights, tensors = layer.shards(num_shards), layer.weights, layer.tensors
    return LayerBytes(
        weights=(weights.bytes + weights.copy_bytes(dtype)) / T,
        trained=weights.trained_bytes / T,
        saved=examples * tensors.saved * layer.shard_fraction(num_shards),
        inputs=examples * tensors.inputs,
        received=examples * tensors.boundary,
        # With the gradient that it adds to the sum.
        workspace=(temp_factor * examples * tensors.workspace + weights.trained_bytes)
        / T,
        saves_inputs=tensors.saves_inputs,
    )


def devices(
    workload: Workload,
    config: ParallelConfig,
    layers_per_stage: Sequence[int],
    *,
    examples: float,
    num_slots: float,
    device: Device,
) -> tuple[Memory, ...]:
    """Returns the memory of each device of a pipeline."""
    load = config.load
    temp_factor = device.temp_factor if workload.traced else 1.0
    layers = [
        layer_bytes(
            layer,
            examples=examples,
            num_shards=config.num_shards,
            dtype=workload.dtype,
            temp_factor=temp_factor,
        )
        for layer in workload.layers
    ]
    stages = [
        stage_bytes(
            layers[span],
            config.remat,
            temp_factor=1.0 if load.splits_backwards else temp_factor,
        )
        for span in stage_spans(layers_per_stage)
    ]
    return load.device_memory(stages, num_slots=num_slots, reserved=device.reserved)
