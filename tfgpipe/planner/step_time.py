"""How long a step takes: stages timed, their schedule simulated, replicas added.

Of a layer on a microbatch of r rows, one pass takes

    FLOPs / (peak x efficiency) + weights / bandwidth          its products
    + fusion_factor x bytes moved / bandwidth                  its other operations
    + all-reduces / link                                       if it is in T shards

and a stage the sum over its layers, plus the device's overhead of an action. Stages go
into `tfgpipe.simulation` with the schedule, the bytes between them and the link's
bandwidth and latency. After that, each device sums gradients over D replicas on a ring,
2 (D - 1) / D of their bytes (Patarasuk and Yuan 2009), and updates its weights, reading
and writing weight, gradient and slots once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence

from tfgpipe._util import stage_spans
from tfgpipe.planner.devices import Device, Link
from tfgpipe.planner.parallel_config import ParallelConfig
from tfgpipe.planner.workload import Layer, Workload, dtype_bytes
from tfgpipe.schedules import ActionKind, Schedule, kinds
from tfgpipe.simulation import Costs, simulate

# Actions above which a step is simulated with fewer microbatches, and continued.
MOST_ACTIONS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of the passes of a stage on one microbatch.

    Attributes:
        forward: The forward.
        backward: The backward, recomputation aside.
        recompute: What is computed again.
    """

    forward: float
    backward: float
    recompute: float

    @property
    def total(self) -> float:
        """All passes together."""
        return self.forward + self.backward + self.recompute


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTimes(PassTimes):
    """Seconds of one stage on one microbatch.

    Attributes:
        reductions: Those of them in all-reduces among shards.
    """

    reductions: PassTimes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step, and what its time goes to, in seconds of the busiest device.

    Attributes:
        pipeline: From the first forward to the last backward.
        bubble: The share of it in which devices wait, on average.
        arithmetic: Forwards and backwards, all-reduces among shards aside.
        recompute: Likewise, what is computed again.
        reductions: All-reduces among shards.
        replicas: The all-reduce of gradients over replicas.
        update: Of weights.
    """

    pipeline: float
    bubble: float
    arithmetic: float
    recompute: float
    reductions: float
    replicas: float
    update: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.pipeline + self.replicas + self.update

    @property
    def shares(self) -> dict[str, float]:
        """What takes which share of the step beside arithmetic, in words."""
        busy = self.arithmetic + self.recompute + self.reductions
        parts = {
            "waiting in the bubble": max(self.pipeline - busy, 0.0),
            "recomputing": self.recompute,
            "all-reduces inside layers": self.reductions,
            "all-reduces of gradients": self.replicas,
            "updating weights": self.update,
        }
        return {what: seconds / self.total for what, seconds in parts.items()}


def ring_seconds(size: float, num: int, link: Link) -> float:
    """Returns how long an all-reduce takes on a ring.

    >>> ring_seconds(8e9, 4, Link(bandwidth=12e9, latency=0.5))
    4.0

    Args:
        size: Bytes on each device.
        num: Devices.
        link: Between neighbours.
    """
    if num == 1:
        return 0.0
    hops = 2 * (num - 1)
    return hops * (size / num / link.bandwidth + link.latency)


def layer_seconds(
    kind: ActionKind,
    layer: Layer,
    *,
    rows: float,
    num_shards: int,
    device: Device,
    dtype: str,
) -> float:
    """Returns what one pass of a layer takes, all-reduces aside.

    Args:
        kind: Forward or backward.
        layer: The layer.
        rows: Of a microbatch.
        num_shards: T.
        device: What runs it.
        dtype: What products are computed in.
    """
    T = layer.shards(num_shards)
    forward = not kind.is_backward
    flops = layer.forward_flops if forward else layer.backward_flops
    traffic = layer.forward_traffic if forward else layer.backward_traffic
    # A backward reads weights, and reads and writes the sum of gradients.
    sums = 0 if forward else 2 * layer.weight_bytes
    weights = layer.parameters / T * (dtype_bytes(dtype) + sums)
    seconds = traffic * rows * layer.share(num_shards) * device.fusion_factor
    seconds /= device.bandwidth
    if flops:
        seconds += device.product_seconds(
            kind,
            flops * rows / T,
            rows=rows * layer.positions,
            weights=weights,
            dtype=dtype,
        )
    return seconds


def stage_times(
    workload: Workload,
    config: ParallelConfig,
    layers_per_stage: Sequence[int],
    *,
    rows: float,
    device: Device,
) -> list[StageTimes]:
    """Returns what each stage takes on a microbatch.

    Args:
        workload: The model.
        config: How it is spread.
        layers_per_stage: The number of layers in each stage.
        rows: Of a microbatch.
        device: What runs it.
    """
    T = config.num_shards
    link = device.link_across(T)
    found = []
    for span in stage_spans(layers_per_stage):
        layers = workload.layers[span]
        repeats = config.remat.recomputed(len(layers))
        seconds = functools.partial(
            layer_seconds, rows=rows, num_shards=T, device=device, dtype=workload.dtype
        )
        forwards = [seconds(kinds.FORWARD, layer) for layer in layers]
        reductions = [
            layer.num_reductions * ring_seconds(rows * layer.output_bytes, T, link)
            if layer.shards(T) > 1
            else 0.0
            for layer in layers
        ]
        reduced = PassTimes(
            forward=sum(reductions),
            backward=sum(reductions),
            recompute=sum(map(operator.mul, repeats, reductions)),
        )
        found.append(
            StageTimes(
                forward=sum(forwards) + device.overhead + reduced.forward,
                backward=sum(seconds(kinds.BACKWARD, layer) for layer in layers)
                + device.overhead
                + reduced.backward,
                recompute=sum(map(operator.mul, repeats, forwards)) + reduced.recompute,
                reductions=reduced,
            )
        )
    return found


def least_seconds(
    workload: Workload,
    config: ParallelConfig,
    layers_per_stage: Sequence[int],
    *,
    rows: float,
    num_slots: float,
    device: Device,
) -> float:
    """Returns what no step is faster than; arguments as of `step_time`.

    A device begins when a microbatch has passed the stages before, then does all its
    work, and whole backwards go back through those stages at the end.
    """
    stages = stage_times(workload, config, layers_per_stage, rows=rows, device=device)
    M, P = config.num_microbatches, config.num_devices
    least = before = 0.0
    for p in range(P):
        work = M * sum(stages[k].total for k in config.stages_on(p))
        least = max(least, before + work)
        before += stages[p].forward
        if config.schedule in ("gpipe", "1f1b"):
            before += stages[p].backward
    return least + sum(
        update_times(
            workload, config, layers_per_stage, num_slots=num_slots, device=device
        )
    )


def update_times(
    workload: Workload,
    config: ParallelConfig,
    layers_per_stage: Sequence[int],
    *,
    num_slots: float,
    device: Device,
) -> tuple[float, float]:
    """Returns the seconds of the all-reduce of gradients and of the weights' update."""
    D, P, T = config.num_replicas, config.num_devices, config.num_shards
    spans = stage_spans(layers_per_stage)
    trained_bytes = max(
        sum(
            layer.weight_bytes * layer.num_trained / layer.shards(T)
            for k in config.stages_on(p)
            for layer in workload.layers[spans[k]]
        )
        for p in range(P)
    )
    # Of weights and slots each is read and written, of gradients read.
    traffic = trained_bytes * (1 + 2 * (1 + num_slots))
    link = device.link_across(D * P * T)
    return ring_seconds(trained_bytes, D, link), traffic / device.bandwidth


def pipeline(
    config: ParallelConfig,
    stages: Sequence[StageTimes],
    *,
    boundary_bytes: Sequence[float],
    link: Link,
) -> tuple[float, float]:
    """Returns the seconds of a pipeline, and the share of them that is bubble.

    Long ones are simulated with fewer microbatches, of which each further group takes
    as long as the one before, if the schedule has a name.

    Args:
        config: How it runs.
        stages: The times of its stages.
        boundary_bytes: What each stage but the last sends on, for a microbatch.
        link: Between neighbours.
    """
    costs = Costs(
        forward=[stage.forward for stage in stages],
        backward=[stage.backward for stage in stages],
        recompute=[stage.recompute for stage in stages],
        recompute_when=config.recompute_when,
        boundary_bytes=list(boundary_bytes),
        bandwidth=link.bandwidth,
        latency=link.latency,
    )
    M, P = config.num_microbatches, config.num_devices
    if P == 1:
        return M * sum(stage.total for stage in stages), 0.0

    def simulated(num_microbatches: int) -> float:
        schedule = config.make_schedule(num_microbatches)
        return simulate(schedule, costs).timeline.step_time

    few, more = 3 * P, 4 * P
    is_own = isinstance(config.schedule, Schedule)
    if is_own or 2 * M * len(stages) <= MOST_ACTIONS or more >= M:
        seconds = simulated(M)
    else:
        short, longer = simulated(few), simulated(more)
        seconds = longer + (M - more) * (longer - short) / P
    busy = M * math.fsum(stage.total for stage in stages)
    return seconds, 1 - busy / (P * seconds)


def step_time(
    workload: Workload,
    config: ParallelConfig,
    layers_per_stage: Sequence[int],
    *,
    rows: float,
    num_slots: float,
    device: Device,
) -> StepTime:
    """Returns the time of a step.

    Args:
        workload: The model.
        config: How it is spread.
        layers_per_stage: The number of layers in each stage.
        rows: Of a microbatch.
        num_slots: Optimizer slots of a trained weight.
        device: What runs it.
    """
    stages = stage_times(workload, config, layers_per_stage, rows=rows, device=device)
    spans = stage_spans(layers_per_stage)
    inputs = [rows * workload.layers[span.start].input_bytes for span in spans]
    P, T = config.num_devices, config.num_shards
    seconds, bubble = pipeline(
        config, stages, boundary_bytes=inputs[1:], link=device.link_across(P * T)
    )
    replicas, update = update_times(
        workload, config, layers_per_stage, num_slots=num_slots, device=device
    )
    M = config.num_microbatches
    busiest = max(
        ([stages[k] for k in config.stages_on(p)] for p in range(P)),
        key=lambda some: sum(stage.total for stage in some),
    )
    reductions = sum(stage.reductions.total for stage in busiest)
    recompute = sum(x.recompute - x.reductions.recompute for x in busiest)
    return StepTime(
        pipeline=seconds,
        bubble=bubble,
        arithmetic=M * (sum(x.total for x in busiest) - reductions - recompute),
        recompute=M * recompute,
        reductions=M * reductions,
        replicas=replicas,
        update=update,
    )
