"""Workloads: layers in a row, with the cost of each for one example."""

from __future__ import annotations

import dataclasses
import math

from tfgpipe._util import stage_spans
from tfgpipe.costs import LayerCost
from tfgpipe.planner.devices import Device
from tfgpipe.planner.parallel_config import ParallelConfig
from tfgpipe.remat import Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model as layers in a row.

    Attributes:
        name: Name of the model.
        layers: The cost of each layer for one example, from input to loss.
        dtype: Dtype of products: `"float32"`, `"bfloat16"` or `"float16"`. Weights that
            are stored in more bytes are copied.
        traced: True if bytes were counted operation by operation, without the fusion
            that formulas take for granted.
        remat: The policy whose saved results the layers' bytes and FLOPs know, or None.
    """

    name: str
    layers: tuple[LayerCost, ...]
    dtype: str = "float32"
    traced: bool = False
    remat: Remat | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(
                f"A workload has at least one layer. Received none for '{self.name}'."
            )

    @property
    def parameters(self) -> float:
        """Number of weights."""
        return math.fsum(layer.weights.count for layer in self.layers)

    @property
    def flops(self) -> float:
        """FLOPs of a step, per example: forward and backward, without recomputation."""
        return math.fsum(x.flops.forward + x.flops.backward for x in self.layers)

    @property
    def max_stages(self) -> int:
        """The largest number of stages."""
        return 1 + sum(layer.may_start for layer in self.layers[1:])

    @property
    def max_parts(self) -> int:
        """The number that T divides for sequences to be in parts."""
        return math.lcm(*(layer.max_parts for layer in self.layers))

    @property
    def max_shards(self) -> int:
        """The number that T divides for any layer to be sharded."""
        return math.lcm(*(layer.max_shards for layer in self.layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedWorkload:
    """A workload in stages on devices.

    Attributes:
        workload: The model.
        config: The configuration.
        layers_per_stage: The number of layers in each stage.
        examples: Examples of a microbatch.
        num_slots: Optimizer slots of a trained weight that a replica has.
        devices: The kind of each device of a pipeline.
    """

    workload: Workload
    config: ParallelConfig
    layers_per_stage: tuple[int, ...]
    examples: float
    num_slots: float
    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        wanted, known = self.config.remat, self.workload.remat
        if wanted.saves_results and wanted != known:
            raise ValueError(
                "What a forward saves of results is counted as a model is read. "
                f"Received remat={wanted!r} and a workload that was read for {known!r}."
                " Read the model with `tfgpipe.planner.read(model, remat=remat)`."
            )

    @property
    def placed_on(self) -> list[Device]:
        """The kind of the device of each stage."""
        return [self.devices[p] for p in self.config.load.placement]

    @property
    def stages(self) -> list[tuple[LayerCost, ...]]:
        """The layers of each stage."""
        spans = stage_spans(self.layers_per_stage)
        return [self.workload.layers[span] for span in spans]
