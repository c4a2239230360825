"""Options of a stage: how it is traced, and how its functions are made and run."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tfgpipe.devices import device_type
from tfgpipe.stage.normalization import BatchNorm

Platform = Literal["cpu", "gpu", "tpu"]
Remat = Literal["stage", "layer", "except_last", "none"]


@dataclasses.dataclass(frozen=True)
class StageOptions:
    """How one stage runs in a step.

    Attributes:
        platform: What its device is. On TPUs XLA compiles the step as a whole: nothing
            is written in place, and every operation names its core.
        training: Whether layers run as in training; None leaves it to each.
        remat: What the backward recomputes.
        jit_compile: Whether XLA compiles each of the stage's functions.
        batch_norm: When moving averages of batch statistics move.
        num_microbatches: M, or None if that is not known.
        may_be_empty: Whether microbatches without rows can occur.
        num_replicas: How many replicas some layers may sum over.
        tpu_core: On TPUs the name of the core.
    """

    platform: Platform = "gpu"
    training: bool | None = True
    remat: Remat = "stage"
    jit_compile: bool = False
    batch_norm: BatchNorm = "microbatch"
    num_microbatches: int | None = None
    may_be_empty: bool = False
    num_replicas: int = 1
    tpu_core: str | None = None

    @property
    def uses_cpu_kernels(self) -> bool:
        """Whether TensorFlow's own kernels for CPUs run it."""
        return self.platform == "cpu" and not self.jit_compile

    @property
    def code(self) -> StageOptions:
        """What of it the functions of a graph depend on, once that is traced."""
        return dataclasses.replace(
            self, training=None, remat="stage", batch_norm="microbatch", num_replicas=1
        )


def platform_of(device: str) -> Platform:
    """Returns what a device is; one that is neither CPU nor TPU counts as a GPU."""
    platforms: dict[str, Platform] = {"CPU": "cpu", "TPU": "tpu"}
    return platforms.get(device_type(device), "gpu")
