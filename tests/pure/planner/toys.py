"""Models small enough to be worked out by hand."""

from __future__ import annotations

from tfgpipe.planner import Device, Layer, Link, ParallelConfig, PlanRequest, Workload

# A second for 100 FLOP, and for 10 bytes.
TOY = Device(
    name="toy",
    flops={"float32": 200.0, "bfloat16": 400.0},
    memory=1e6,
    bandwidth=10.0,
    link=Link(bandwidth=5.0, latency=0.25),
    network=Link(bandwidth=1.0, latency=1.0),
    group=4,
    efficiency=0.5,
    fusion_factor=0.5,
    overhead=0.0,
)


def layer(**values) -> Layer:
    """Returns a layer, two shards of which share 40 of 100 kept bytes."""
    usual = {
        "name": "layer",
        "parameters": 10,
        "forward_flops": 100,
        "backward_flops": 200,
        "forward_traffic": 20,
        "backward_traffic": 40,
        "kept_bytes": 100,
        "work_bytes": 30,
        "input_bytes": 5,
        "output_bytes": 5,
        "max_shards": 4,
        "whole_bytes": 20,
    }
    return Layer(**{**usual, **values})


def workload(num_layers: int = 4, dtype: str = "float32", **values) -> Workload:
    layers = tuple(layer(**{"name": f"{i}", **values}) for i in range(num_layers))
    return Workload(name="toy", layers=layers, dtype=dtype)


def config(**values) -> ParallelConfig:
    usual = {
        "num_replicas": 1,
        "num_devices": 1,
        "num_shards": 1,
        "num_microbatches": 1,
        "schedule": "gpipe",
        "remat": "none",
    }
    return ParallelConfig(**{**usual, **values})


def request(model: Workload | None = None, **values) -> PlanRequest:
    usual = {"device": TOY, "num_devices": 4, "batch_size": 8, "num_slots": 2}
    return PlanRequest(model or workload(), **{**usual, **values})
