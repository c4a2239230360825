"""A model cut into stages that are on devices, ready to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import stage_spans
from tfgpipe.capture import Network, Value, Wire, source_model, tracer
from tfgpipe.devices import device_kind
from tfgpipe.distribution import Placement
from tfgpipe.runtime import microbatch
from tfgpipe.runtime.executor import Tensors
from tfgpipe.runtime.pipeline import Pipeline
from tfgpipe.schedules import Schedule
from tfgpipe.stage import (
    Remat,
    Stage,
    StageCache,
    Transfer,
    TransferDtype,
    normalization,
)


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """How the stages of a pipeline are run.

    Attributes:
        remat: What the backward recomputes.
        jit_compile: Whether XLA compiles programs; `"auto"` for on GPUs.
        batch_norm: When moving averages of batch statistics move.
        transfer_dtype: What values are compressed to on their way to another stage.
    """

    remat: Remat
    jit_compile: bool | Literal["auto"]
    batch_norm: normalization.BatchNorm
    transfer_dtype: TransferDtype | None


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A recorded model, its stages, and their devices.

    Attributes:
        original: What was pipelined, as it was given.
        recorded: Its calls.
        stages: The K stages.
        placement: Their devices.
        options: How they are run.
    """

    original: source_model.Original
    recorded: tracer.Recording
    stages: tuple[Stage, ...]
    placement: Placement
    options: PipelineOptions

    def recut(self, counts: Sequence[int]) -> Assembly:
        """Returns the same model cut into stages of these numbers of calls."""
        stages = cut_stages(self.recorded.network, counts)
        return dataclasses.replace(self, stages=stages)

    def engine(self, schedule: Schedule) -> Pipeline:
        """Returns what runs the stages in the order of a schedule."""
        devices, outputs = self.placement.devices, self.recorded.network.outputs
        return Pipeline(
            stages=self.stages,
            wanted=outputs,
            shards=self.placement.shards,
            schedule=schedule,
            remat=self.options.remat,
            jit_compile=[self._compiles(device) for device in devices],
            batch_norm=self.options.batch_norm,
            transfer=Transfer(self.options.transfer_dtype, outputs),
        )

    def wires(
        self, inputs: Any, side_inputs: Mapping[str, tf.Tensor]
    ) -> dict[Wire, tf.Tensor]:
        """Returns what goes into the pipeline: tensors and the masks on them."""
        fed = self.original.feed(inputs, side_inputs)
        microbatch.check_equal_batches(
            {name: x for name, x in fed.items() if x is not None}
        )
        wires = {}
        numbers = self.recorded.network.inputs
        for number, x in zip(numbers, fed.values(), strict=True):
            if x is None:
                continue
            wires[Wire(number)] = x
            mask = keras_internals.get_mask(x)
            if mask is not None:
                wires[Wire(number, True)] = mask
        return wires

    def known_spec(self, inputs: Any, side_inputs: Mapping[str, Any]) -> Any:
        """Returns shapes and types of the outputs, if those of the inputs are known.

        They are if they are, but for the rows, those recorded, and no mask is about,
        which would be one more thing to know.

        Args:
            inputs: Tensors, symbolic or not.
            side_inputs: Likewise.
        """
        specs, network = self.recorded.specs, self.recorded.network
        fed = list(self.original.feed(inputs, side_inputs).values())
        for number, x in zip(network.inputs, fed, strict=True):
            known = specs[number]
            if (
                x is None
                or keras_internals.get_mask(x) is not None
                or keras.backend.standardize_dtype(x.dtype) != known.dtype
                or tuple(x.shape[1:]) != known.shape[1:]
            ):
                return None
        if any(
            keras_internals.get_mask(specs[number]) is not None
            for number in network.outputs
        ):
            return None
        rows = next(x.shape[0] for x in fed if x is not None)

        def spec(value: Value) -> keras.KerasTensor:
            known = specs[value.number]
            return keras.KerasTensor((rows, *known.shape[1:]), known.dtype)

        return keras.tree.map_structure(spec, self.recorded.output)

    def structured(self, outputs: Tensors) -> Any:
        """Returns outputs nested as the model nests them, their masks on them."""
        for wire, value in outputs.items():
            if wire.is_mask:
                keras_internals.set_mask(outputs[Wire(wire.number)], value)
        return keras.tree.map_structure(
            lambda value: outputs.get(Wire(value.number)), self.recorded.output
        )

    def _compiles(self, device: str) -> bool:
        if device_kind(device) == "TPU":  # XLA compiles the step, whatever is in it.
            return False
        if self.options.jit_compile == "auto":
            return device_kind(device) == "GPU"
        return bool(self.options.jit_compile)


def cut_stages(network: Network, counts: Sequence[int]) -> tuple[Stage, ...]:
    """Returns stages of these numbers of calls, which share equal programs."""
    library = StageCache()
    return tuple(
        Stage(k, network.part(span), library)
        for k, span in enumerate(stage_spans(counts))
    )
