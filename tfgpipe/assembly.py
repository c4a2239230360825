"""A model cut into stages that are on devices, ready to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe import checks, mesh, partition, seams
from tfgpipe.engine import Pipeline
from tfgpipe.layers import BatchNorm
from tfgpipe.network import Network, Value
from tfgpipe.original import Original
from tfgpipe.placement import Placement
from tfgpipe.recording import Recording
from tfgpipe.replay import Wire
from tfgpipe.schedule import Schedule
from tfgpipe.stage import Library, Remat, Stage
from tfgpipe.step import Tensors


@dataclasses.dataclass(frozen=True)
class Options:
    """How the stages of a pipeline are run.

    Attributes:
        remat: What the backward recomputes.
        jit_compile: Whether XLA compiles programs; `"auto"` for on GPUs.
        batch_norm: When moving averages of batch statistics move.
    """

    remat: Remat
    jit_compile: bool | Literal["auto"]
    batch_norm: BatchNorm


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

    original: Original
    recorded: Recording
    stages: tuple[Stage, ...]
    placement: Placement
    options: Options

    def recut(self, counts: Sequence[int]) -> Assembly:
        """Returns the same model cut into stages of these numbers of calls."""
        stages = cut(self.recorded.network, counts)
        return dataclasses.replace(self, stages=stages)

    def engine(self, schedule: Schedule) -> Pipeline:
        """Returns what runs the stages in the order of a schedule."""
        devices = self.placement.devices
        return Pipeline(
            stages=self.stages,
            wanted=self.recorded.network.outputs,
            devices=devices,
            schedule=schedule,
            remat=self.options.remat,
            jit_compile=[self._compiles(device) for device in devices],
            batch_norm=self.options.batch_norm,
        )

    def wires(
        self, inputs: Any, side_inputs: Mapping[str, tf.Tensor]
    ) -> dict[Wire, tf.Tensor]:
        """Returns what goes into the pipeline: tensors and the masks on them."""
        fed = self.original.feed(inputs, side_inputs)
        checks.equal_batches({name: x for name, x in fed.items() if x is not None})
        wires = {}
        numbers = self.recorded.network.inputs
        for number, x in zip(numbers, fed.values(), strict=True):
            if x is None:
                continue
            wires[Wire(number)] = x
            mask = seams.get_mask(x)
            if mask is not None:
                wires[Wire(number, True)] = mask
        return wires

    def knows(self, inputs: Any, side_inputs: Mapping[str, Any]) -> bool:
        """Returns whether symbolic inputs are, but for their rows, those recorded."""
        fed = self.original.feed(inputs, side_inputs).values()
        known = [self.recorded.specs[n] for n in self.recorded.network.inputs]
        return all(
            x is not None and (x.dtype, x.shape[1:]) == (spec.dtype, spec.shape[1:])
            for x, spec in zip(fed, known, strict=True)
        )

    def output_spec(self, inputs: Any, side_inputs: Mapping[str, Any]) -> Any:
        """Returns shapes and types of the outputs for symbolic inputs that it knows."""
        fed = self.original.feed(inputs, side_inputs).values()
        rows = next(x.shape[0] for x in fed if x is not None)

        def spec(value: Value) -> keras.KerasTensor:
            known = self.recorded.specs[value.number]
            return keras.KerasTensor((rows, *known.shape[1:]), known.dtype)

        return keras.tree.map_structure(spec, self.recorded.output)

    def structured(self, outputs: Tensors) -> Any:
        """Returns outputs nested as the model nests them, their masks on them."""
        for wire, value in outputs.items():
            if wire.is_mask:
                seams.set_mask(outputs[Wire(wire.number)], value)
        return keras.tree.map_structure(
            lambda value: outputs.get(Wire(value.number)), self.recorded.output
        )

    def _compiles(self, device: str) -> bool:
        if self.options.jit_compile == "auto":
            return mesh.kind(device) == "GPU"
        return bool(self.options.jit_compile)


def cut(network: Network, counts: Sequence[int]) -> tuple[Stage, ...]:
    """Returns stages of these numbers of calls, which share equal programs."""
    library = Library()
    return tuple(
        Stage(k, network.part(span), library)
        for k, span in enumerate(partition.spans(counts))
    )
