"""The law of memory: bytes of a layer, of a stage, of a device.

A device that runs the stages S under a schedule holds

    weights        of all its stages, and copies of them in the dtype of products
    gradients      one for each trained weight
    slots          of the optimizer, as many for each trained weight
    inputs         of each microbatch in flight, the values that a stage received
    activations    of each microbatch in flight, what forwards save for backwards
    recomputed     of each microbatch whose backward is under way, what it recomputes
    workspace      the peak of one layer's backward
    reserved       by the runtime

The first five add up over the stages of a device. Of recomputed tensors and workspace
there are those of one stage at a time. A schedule says how many microbatches are in
flight (`Schedule.in_flight`), and how many split backwards have begun
(`Schedule.in_backward`); a policy of rematerialisation, what is saved of a layer.

All is arithmetic on numbers or arrays: for one stage, for the shards of one, or for all
stages [s, e) at once, as the solver of a partition needs them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

from tfgpipe.remat import Remat
from tfgpipe.schedules import Schedule

# A number, or an array of them.
Bytes: TypeAlias = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of a layer on one device, for one microbatch.

    Attributes:
        weights: Bytes of the weights, and of their copies.
        trained: Bytes of the trained weights.
        saved: Bytes that the forward saves for the backward.
        inputs: Bytes of the layer's inputs.
        received: Bytes that a stage receives which begins with the layer.
        workspace: Peak bytes of the backward.
        saves_inputs: True if `saved` includes `received`.
        kept: Bytes of results that the policy saves in any case.
    """

    weights: float = 0
    trained: float = 0
    saved: float = 0
    inputs: float = 0
    received: float = 0
    workspace: float = 0
    saves_inputs: bool = False
    kept: float = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Bytes of a stage on one device, whatever the schedule.

    Attributes:
        weights: Bytes of the weights, and of their copies.
        trained: Bytes of the trained weights.
        inputs: Bytes that each microbatch in flight holds of what was received.
        saved: Bytes that each holds of what forwards save.
        recomputed: Bytes that the backward of a microbatch recomputes.
        workspace: Peak bytes of one layer's backward.
    """

    weights: Bytes
    trained: Bytes
    inputs: Bytes
    saved: Bytes
    recomputed: Bytes
    workspace: Bytes = 0.0

    def at(self, start: int, end: int) -> StageBytes:
        """Returns the bytes of the stage [start, end), of tables `[..., s, e]`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["workspace"]
        entries = {name: table[..., start, end] for name, table in fields.items()}
        return StageBytes(**entries, workspace=self.workspace)

    def by_time(self, num_slots: float) -> tuple[Bytes, Bytes, Bytes]:
        """Returns bytes of a microbatch in flight, of a backward, and of all the step.

        They are `kept_bytes`, `backward_bytes` and `fixed_bytes` of `tfgpipe.Costs`.
        """
        return (
            self.inputs + self.saved,
            self.recomputed + self.workspace,
            self.weights + (1 + num_slots) * self.trained,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device, by what they are for.

    Attributes:
        weights: Bytes of weights, and of copies in the dtype of products.
        gradients: Bytes of gradients.
        slots: Bytes of the optimizer's slots.
        inputs: Bytes of values received, of the microbatches in flight.
        activations: Bytes of saved tensors, of the microbatches in flight.
        recomputed: Bytes of recomputed tensors, of the backwards under way.
        workspace: Bytes of the largest layer's backward.
        reserved: Bytes that the runtime reserves.
    """

    weights: Bytes = 0
    gradients: Bytes = 0
    slots: Bytes = 0
    inputs: Bytes = 0
    activations: Bytes = 0
    recomputed: Bytes = 0
    workspace: Bytes = 0
    reserved: Bytes = 0

    @property
    def parts(self) -> dict[str, Bytes]:
        """Bytes by the name of the part."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def total(self) -> Bytes:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def state(self) -> Bytes:
        """Bytes that do not depend on microbatches: weights, gradients, slots."""
        return self.weights + self.gradients + self.slots

    def between(self, other: Memory, part: float) -> Memory:
        """Returns that part of this memory, and the rest of the other."""
        pairs = zip(self.parts.items(), other.parts.values(), strict=True)
        return Memory(**{name: part * x + (1 - part) * y for (name, x), y in pairs})

    @property
    def largest(self) -> str:
        """The name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclasses.dataclass(frozen=True)
class StepLoad:
    """Microbatches that a schedule has each stage hold and recompute.

    Attributes:
        remat: The rematerialisation policy.
        num_microbatches: M.
        placement: For each stage the index of its device.
        in_flight: For each stage its microbatches in flight when its device has most.
        in_backward: For each stage the most microbatches whose backward is under way.
        kept: For each stage the number of microbatches whose forward saves what the
            backward reads.
        splits_backwards: True if some backwards run in two halves.
    """

    remat: Remat
    num_microbatches: int
    placement: tuple[int, ...]
    in_flight: tuple[float, ...]
    in_backward: tuple[float, ...]
    kept: tuple[float, ...]
    splits_backwards: bool

    @classmethod
    def of(cls, schedule: Schedule, remat: Remat) -> StepLoad:
        """Returns the load of a schedule under a policy."""
        M = schedule.num_microbatches
        kept = (
            float(sum(remat.keeps(schedule, k, m) for m in range(M)))
            for k in range(schedule.num_stages)
        )
        return cls(
            remat,
            M,
            schedule.placement,
            schedule.in_flight,
            schedule.in_backward,
            tuple(kept),
            schedule.splits_backwards,
        )

    def continued(self, shorter: StepLoad, num_microbatches: int) -> StepLoad:
        """Returns the load of more microbatches, which goes on as it grew."""
        more = num_microbatches - self.num_microbatches
        step = self.num_microbatches - shorter.num_microbatches

        def grown(longer: Sequence[float], short: Sequence[float]) -> tuple[float, ...]:
            pairs = zip(longer, short, strict=True)
            return tuple(x + more * (x - y) / step for x, y in pairs)

        return dataclasses.replace(
            self,
            num_microbatches=num_microbatches,
            in_flight=grown(self.in_flight, shorter.in_flight),
            in_backward=grown(self.in_backward, shorter.in_backward),
            kept=grown(self.kept, shorter.kept),
        )

    def repeated(self, num_microbatches: int) -> StepLoad:
        """Returns the load of more microbatches, of which no more are held."""
        scale = num_microbatches / self.num_microbatches
        kept = tuple(x * scale for x in self.kept)
        return dataclasses.replace(self, num_microbatches=num_microbatches, kept=kept)

    @functools.cached_property
    def recomputed_fractions(self) -> tuple[float, ...]:
        """For each stage, the part of microbatches whose forward saves nothing."""
        M = self.num_microbatches
        return tuple((M - kept) / M for kept in self.kept)

    def recomputed(self, k: int, num_layers: int) -> list[float]:
        """Returns the mean number of recomputations of each layer of stage k."""
        fraction = self.recomputed_fractions[k]
        each = (self.remat.recomputed(num_layers, kept=kept) for kept in (True, False))
        return [x + fraction * (y - x) for x, y in zip(*each, strict=True)]

    @property
    def is_additive(self) -> bool:
        """True if the time of a stage is a sum over its layers, in all stages alike."""
        counts = {x for k in range(len(self.kept)) for x in self.recomputed(k, 2)}
        counts.update(self.recomputed(0, 1))
        return len(counts) == 1

    def stage_memory(self, k: int, stage: StageBytes, *, num_slots: float) -> Memory:
        """Returns the memory of stage k on its device, as if it had it for itself."""
        return self._memory([(k, stage)], num_slots=num_slots)

    def device_memory(
        self, stages: Sequence[StageBytes], *, num_slots: float
    ) -> tuple[Memory, ...]:
        """Returns the memory of each device.

        Args:
            stages: The bytes of each stage.
            num_slots: Optimizer slots for each trained weight.
        """
        return tuple(
            self._memory(
                [(k, stages[k]) for k, q in enumerate(self.placement) if q == p],
                num_slots=num_slots,
            )
            for p in range(max(self.placement) + 1)
        )

    def _memory(
        self,
        stages: Sequence[tuple[int, StageBytes]],
        *,
        num_slots: float,
    ) -> Memory:
        """Returns the memory of one device with some stages: the law of memory."""
        gradients = sum(x.trained for _, x in stages)
        flight, begun = self.in_flight, self.in_backward
        return Memory(
            weights=sum(x.weights for _, x in stages),
            gradients=gradients,
            slots=num_slots * gradients,
            inputs=sum(flight[k] * x.inputs for k, x in stages),
            activations=sum(flight[k] * x.saved for k, x in stages),
            recomputed=_largest([begun[k] * x.recomputed for k, x in stages]),
            workspace=_largest([x.workspace for _, x in stages]),
        )


def part_without_room(least: float, most: float, limit: float) -> float:
    """Returns the part of activations that a device has to recompute.

    That is by bytes; by FLOPs it is less: what is cheap for its bytes comes first.

    Args:
        least: Bytes of the device if all is recomputed that may be.
        most: Bytes if forwards save all.
        limit: Bytes that it has.
    """
    if least >= most:
        return 0.0
    room = (1 - 1e-9) * limit  # Whatever the rounding.
    return min(max((most - room) / (most - least), 0.0), 1.0)


def stage_bytes(
    layers: Sequence[LayerBytes], remat: Remat, *, temp_factor: float = 1.0
) -> StageBytes:
    """Returns the bytes of one stage; `tables.stage_byte_tables` has them of all.

    Args:
        layers: The bytes of its layers.
        remat: The rematerialisation policy.
        temp_factor: The part of recomputed tensors that a compiler leaves.
    """
    saved, inputs = [x.saved for x in layers], [x.inputs for x in layers]
    kept = [x.kept for x in layers]
    all_saved = remat.keeps_all and not remat.has_segments(len(layers))
    return StageBytes(
        weights=sum(x.weights for x in layers),
        trained=sum(x.trained for x in layers),
        inputs=0.0 if all_saved and layers[0].saves_inputs else layers[0].received,
        saved=remat.saved_bytes(saved, inputs, kept),
        recomputed=remat.recomputed_bytes(
            [temp_factor * x for x in saved], inputs, [temp_factor * x for x in kept]
        ),
        workspace=max(x.workspace for x in layers),
    )


def _largest(values: Sequence[Bytes]) -> Bytes:
    """Returns the largest of numbers, or of arrays element by element."""
    import numpy as np

    return functools.reduce(np.maximum, values)
