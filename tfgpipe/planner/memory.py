"""The memory of a device, by what it is for.

Of a device with the stages S, in shares of T shards where layers are sharded, r rows to
a microbatch, P trained parameters of N, of s bytes each:

    weights        s N, and 2 N for their copies where products are in half precision
    gradients      s P
    slots          s P a slot: 2 of Adam, 1 of momentum or RMSProp
    inputs         of each microbatch in flight, what the stage received
    activations    of each microbatch in flight, what its forward saves for its backward
    recomputed     of the microbatch under way, what its backward computes again
    workspace      the most that a layer's backward holds of its own, and the gradient
                   that it adds to the sum
    reserved       by the runtime

Of recomputed tensors and workspace a compiler leaves the device's `temp_factor`, if the
layers were counted operation by operation.

Microbatches in flight on stage k are M under GPipe, min(K - k, M) under 1F1B and
min(K, M) under zero bubble, which holds all that it recomputed for as many microbatches
as its gradients of weights are late, min(k + 1, M). Of several stages on a device they
are counted by going through its actions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from tfgpipe import schedules
from tfgpipe._util import stage_spans
from tfgpipe.planner.devices import Device
from tfgpipe.planner.parallel_config import ParallelConfig
from tfgpipe.planner.workload import Workload, dtype_bytes
from tfgpipe.schedules import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device: see the top of this module for each part."""

    weights: float = 0
    gradients: float = 0
    slots: float = 0
    inputs: float = 0
    activations: float = 0
    recomputed: float = 0
    workspace: float = 0
    reserved: float = 0

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by the name of the part."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def state(self) -> float:
        """What is there whatever is computed: weights, gradients, slots."""
        return self.weights + self.gradients + self.slots

    @property
    def largest(self) -> str:
        """The name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name])


def devices(
    workload: Workload,
    config: ParallelConfig,
    layers_per_stage: Sequence[int],
    *,
    rows: float,
    num_slots: float,
    device: Device,
) -> tuple[Memory, ...]:
    """Returns the memory of each device of a pipeline.

    Args:
        workload: The model.
        config: The configuration.
        layers_per_stage: The number of layers in each stage.
        rows: r, rows of a microbatch.
        num_slots: Optimizer slots of a trained weight.
        device: The kind of device.
    """
    T, P, M = config.num_shards, config.num_devices, config.num_microbatches
    schedule = config.schedule
    if isinstance(schedule, Schedule):
        flight, begun = schedule.in_flight, schedule.in_backward
        split = schedule.splits_backwards
    else:
        flight = in_flight(
            schedule,
            num_devices=P,
            stages_per_device=config.stages_per_device,
            num_microbatches=M,
        )
        split = schedule == "zero_bubble"
        begun = tuple(min(k + 1, M) if split else 1 for k in range(config.num_stages))
    size = dtype_bytes(workload.dtype)
    stages = [workload.layers[span] for span in stage_spans(layers_per_stage)]
    found = []
    for p in range(P):
        mine = config.stages_on(p)
        layers = [layer for k in mine for layer in stages[k]]
        weights = sum(
            (x.weight_bytes + (size if size < x.weight_bytes else 0))
            * (x.parameters / x.shards(T))
            for x in layers
        )
        gradients = sum(x.weight_bytes * x.num_trained / x.shards(T) for x in layers)
        left = device.temp_factor if workload.traced else 1.0
        inputs = activations = recomputed = 0.0
        for k in mine:
            remat, size_in = config.remat, [rows * x.input_bytes for x in stages[k]]
            saved = [rows * x.kept_bytes * x.share(T) for x in stages[k]]
            activations += flight[k] * remat.saved_bytes(saved, size_in)
            if not remat.keeps_all or remat.has_segments(len(saved)):
                inputs += flight[k] * size_in[0]
            # Where backwards are split, the gradients of weights take it, in another
            # function.
            share = 1.0 if split else left
            again = remat.recomputed_bytes([share * x for x in saved], size_in)
            recomputed = max(recomputed, begun[k] * again)
        found.append(
            Memory(
                weights=weights,
                gradients=gradients,
                slots=num_slots * gradients,
                inputs=inputs,
                activations=activations,
                recomputed=recomputed,
                workspace=max(
                    (left * rows * x.work_bytes + x.weight_bytes * x.num_trained)
                    / x.shards(T)
                    for x in layers
                ),
                reserved=device.reserved,
            )
        )
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def in_flight(
    name: schedules.Name,
    *,
    num_devices: int,
    stages_per_device: int,
    num_microbatches: int,
) -> tuple[int, ...]:
    """Returns for each stage how many microbatches it holds when its device holds most.

    >>> in_flight("1f1b", num_devices=4, stages_per_device=1, num_microbatches=8)
    (4, 3, 2, 1)

    Args:
        name: The schedule.
        num_devices: K.
        stages_per_device: v.
        num_microbatches: M.
    """
    K, v, M = num_devices, stages_per_device, num_microbatches
    if v == 1 and name == "gpipe":
        return (M,) * K
    if v == 1 and name == "zero_bubble":
        return (min(K, M),) * K
    if v == 1 and name in ("1f1b", "interleaved"):
        return tuple(min(K - k, M) for k in range(K))
    # After as many groups of K microbatches as there are in flight, all is repeated.
    schedule = schedules.make(
        name, num_stages=v * K, num_microbatches=min(M, 4 * K), num_devices=K
    )
    return schedule.in_flight
