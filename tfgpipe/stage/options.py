"""Options of a stage: how it is traced, and how its functions are made and run."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tfgpipe import remat as remat_lib
from tfgpipe.devices import device_type
from tfgpipe.graph import joint_graph
from tfgpipe.remat import Remat
from tfgpipe.stage import codecs
from tfgpipe.stage.codecs import Codec
from tfgpipe.stage.normalization import BatchNorm

Platform = Literal["cpu", "gpu", "tpu"]


@dataclasses.dataclass(frozen=True)
class StageOptions:
    """The options of one stage: the user's, its device's, and those of the step.

    Attributes:
        remat: The rematerialisation policy.
        jit_compile: True to compile each of the stage's functions by XLA; `"auto"` for
            on GPUs, and on CPUs only chains of elementwise operations.
        batch_norm: `"microbatch"` or `"deferred"`: updates of moving averages by each
            microbatch, or once a step.
        codec: The encoding of values on their way to another stage.
        platform: Device type; None infers it from the name.
        training: Mode in which layers run; None leaves it to each.
        evaluates: True if no gradient of anything is wanted.
        num_microbatches: M, or None if that is not known.
        may_be_empty: True if microbatches can be empty.
        num_replicas: Number of replicas that some layers may sum over.
        passes: Rewritings of the joint graph after those of the platform.
    """

    remat: Remat = dataclasses.field(default_factory=lambda: remat_lib.find("stage"))
    jit_compile: bool | Literal["auto"] = False
    batch_norm: BatchNorm = "microbatch"
    codec: Codec = dataclasses.field(default_factory=lambda: codecs.find(None))
    platform: Platform | None = None
    training: bool | None = True
    evaluates: bool = False
    num_microbatches: int | None = None
    may_be_empty: bool = False
    num_replicas: int = 1
    passes: tuple[joint_graph.Pass, ...] = ()

    def on(self, device: str) -> StageOptions:
        """Returns the options of a stage on a device."""
        platform = self.platform or platform_of(device)
        if platform == "tpu" and not self.jit_compile:
            raise ValueError(
                "TensorFlow has few kernels for TPUs, so XLA compiles whatever runs on "
                "one. Received `jit_compile=False` for a pipeline on TPUs. Leave it "
                "out."
            )
        return dataclasses.replace(self, platform=platform)

    @property
    def compiles_functions(self) -> bool:
        """True if XLA compiles each of the stage's functions."""
        if self.jit_compile == "auto":
            return self.platform != "cpu"
        return self.jit_compile

    @property
    def compiles_everything(self) -> bool:
        """True if XLA compiles also what stands around a function, and between two."""
        return self.platform == "tpu"

    @property
    def compiles_chains(self) -> bool:
        """True if XLA compiles chains of elementwise operations in the functions."""
        return self.jit_compile == "auto" and self.platform == "cpu"

    @property
    def uses_gpu_kernels(self) -> bool:
        """True if TensorFlow's own kernels for GPUs run it."""
        return self.platform == "gpu" and not self.compiles_functions

    @property
    def code(self) -> StageOptions:
        """The options that functions of a traced graph depend on."""
        return StageOptions(
            jit_compile=self.compiles_functions,
            platform=self.platform,
            training=None,
            num_microbatches=self.num_microbatches,
            may_be_empty=self.may_be_empty,
        )


def platform_of(device: str) -> Platform:
    """Returns the type of a device; one that is neither CPU nor TPU counts as a GPU."""
    platforms: dict[str, Platform] = {"CPU": "cpu", "TPU": "tpu"}
    return platforms.get(device_type(device), "gpu")
