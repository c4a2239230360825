"""Options of a stage: how it is traced, and how its functions are made and run."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tfgpipe import remat as remat_lib
from tfgpipe.devices import device_type
from tfgpipe.remat import Remat
from tfgpipe.stage.boundary import TransferDtype
from tfgpipe.stage.normalization import BatchNorm

Platform = Literal["cpu", "gpu", "tpu"]


@dataclasses.dataclass(frozen=True)
class StageOptions:
    """How one stage runs: as the user chose, on its device, in a step.

    Attributes:
        remat: What the backward recomputes.
        jit_compile: Whether XLA compiles each of the stage's functions; `"auto"` for on
            GPUs, and on CPUs only chains of elementwise operations.
        batch_norm: When moving averages of batch statistics move.
        transfer_dtype: What values are compressed to on their way to another stage.
        platform: What its device is, or None for what the device's name says. On TPUs
            XLA compiles the step as a whole: nothing is written in place, and every
            operation names its core.
        tpu_core: On TPUs the name of the core.
        training: Whether layers run as in training; None leaves it to each.
        num_microbatches: M, or None if that is not known.
        may_be_empty: Whether microbatches without examples can occur.
        num_replicas: How many replicas some layers may sum over.
    """

    remat: Remat = dataclasses.field(default_factory=lambda: remat_lib.find("stage"))
    jit_compile: bool | Literal["auto"] = False
    batch_norm: BatchNorm = "microbatch"
    transfer_dtype: TransferDtype | None = None
    platform: Platform | None = None
    tpu_core: str | None = None
    training: bool | None = True
    num_microbatches: int | None = None
    may_be_empty: bool = False
    num_replicas: int = 1

    def on(self, device: str) -> StageOptions:
        """Returns the options of a stage on a device."""
        platform = self.platform or platform_of(device)
        core = device if platform == "tpu" else None
        return dataclasses.replace(self, platform=platform, tpu_core=core)

    @property
    def compiles_functions(self) -> bool:
        """Whether XLA compiles each of the stage's functions."""
        if self.jit_compile == "auto":
            return self.platform == "gpu"
        return self.jit_compile and self.platform != "tpu"

    @property
    def compiles_chains(self) -> bool:
        """Whether XLA compiles chains of elementwise operations in the functions."""
        return self.jit_compile == "auto" and self.platform == "cpu"

    @property
    def uses_cpu_kernels(self) -> bool:
        """Whether TensorFlow's own kernels for CPUs run it."""
        return self.platform == "cpu" and not self.compiles_functions

    @property
    def uses_gpu_kernels(self) -> bool:
        """Whether TensorFlow's own kernels for GPUs run it."""
        return self.platform == "gpu" and not self.compiles_functions

    @property
    def code(self) -> StageOptions:
        """What of it the functions of a graph depend on, once that is traced."""
        return StageOptions(
            jit_compile=self.compiles_functions,
            platform=self.platform,
            tpu_core=self.tpu_core,
            training=None,
            num_microbatches=self.num_microbatches,
            may_be_empty=self.may_be_empty,
        )


def platform_of(device: str) -> Platform:
    """Returns what a device is; one that is neither CPU nor TPU counts as a GPU."""
    platforms: dict[str, Platform] = {"CPU": "cpu", "TPU": "tpu"}
    return platforms.get(device_type(device), "gpu")
