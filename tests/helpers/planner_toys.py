"""Models small enough to be worked out by hand."""

from __future__ import annotations

import dataclasses

from tfgpipe.costs import LayerCost, PassCost, TensorBytes, Weights
from tfgpipe.planner import Device, Link, ParallelConfig, PlanRequest, Workload
from tfgpipe.planner.workload import StagedWorkload

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


def layer(**values) -> LayerCost:
    """Returns a layer, two shards of which share 40 of 100 saved bytes.

    Args:
        **values: Other values; those of weights and tensors by their own names.
    """
    usual = {
        "weights": Weights(10),
        "flops": PassCost(100, 200),
        "traffic": PassCost(20, 40),
        "tensors": TensorBytes(100, 30, 5, 5, replicated=20, saves_inputs=True),
    }
    for name in ("weights", "tensors"):
        value = usual[name]
        inner = {f.name for f in dataclasses.fields(value)} & set(values)
        own = {key: values.pop(key) for key in inner}
        usual[name] = dataclasses.replace(value, **own)
    return LayerCost(**{"name": "layer", "max_shards": 4, **usual, **values})


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


def staged(model, config, layers_per_stage, **values) -> StagedWorkload:
    """Returns a workload in stages, by default with microbatches of two examples."""
    usual = {
        "examples": 2,
        "num_slots": 2,
        "devices": (values.pop("device", TOY),) * config.num_devices,
    }
    return StagedWorkload(
        workload=model,
        config=config,
        layers_per_stage=layers_per_stage,
        **{**usual, **values},
    )
