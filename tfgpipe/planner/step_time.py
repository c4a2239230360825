"""How long a step takes: stages timed, their schedule simulated, replicas added.

Of a layer on a microbatch, one pass takes

    FLOPs / (peak x efficiency) + weights / bandwidth          its products
    + fusion_factor x bytes moved / bandwidth                  its other operations
    + exchanges / link                                         if it is in T shards

and a stage the sum over its layers, plus the device's overhead of an action. Stages go
into `tfgpipe.simulation` with the schedule, the bytes between them and the link's
bandwidth and latency. After that, each device sums gradients over D replicas on a ring,
2 (D - 1) / D of their bytes (Patarasuk and Yuan 2009), and updates its weights, reading
and writing weight, gradient and slots once. Of weights in slices each gather is half of
such a sum, amid the passes, and so is the sum of gradients. Sums that start early
(`ParallelConfig.sum_when`) are waited for as far as they take longer than backwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from tfgpipe.costs import (
    LayerCost,
    PassCost,
    StageWork,
    dtype_bytes,
    stage_work,
)
from tfgpipe.planner import memory
from tfgpipe.planner.devices import Device
from tfgpipe.planner.parallel_config import ParallelConfig
from tfgpipe.planner.shard_axes import UNITS, ShardAxis, ring_seconds
from tfgpipe.planner.workload import StagedWorkload
from tfgpipe.schedules import ActionKind, Schedule, kinds
from tfgpipe.simulation import Costs, simulate

# Actions above which a step is simulated with fewer microbatches, and continued.
MOST_ACTIONS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTimes(StageWork):
    """Seconds of one stage on one microbatch.

    Attributes:
        reductions: Exchanges among shards.
    """

    reductions: StageWork


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, and of its parts on the busiest device.

    Attributes:
        pipeline: From the first forward to the last backward.
        bubble: Share of the step in which devices wait, on average.
        arithmetic: Forwards and backwards, exchanges among shards aside.
        recompute: Recomputation, exchanges among shards aside.
        reductions: Exchanges among shards.
        replicas: The all-reduce of gradients over replicas.
        update: The update of weights.
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
        """Shares of the step beside arithmetic, by their names."""
        busy = self.arithmetic + self.recompute + self.reductions
        parts = {
            "waiting in the bubble": max(self.pipeline - busy, 0.0),
            "recomputing": self.recompute,
            "exchanges inside layers": self.reductions,
            "all-reduces of gradients": self.replicas,
            "updating weights": self.update,
        }
        return {what: seconds / self.total for what, seconds in parts.items()}


def layer_seconds(
    layer: LayerCost,
    *,
    examples: float,
    num_shards: int,
    device: Device,
    dtype: str,
    axis: ShardAxis = UNITS,
    saves_results: bool = False,
) -> PassCost:
    """Returns the seconds of a layer on a device of a table, exchanges aside."""
    T, parts = axis.parts(layer, num_shards), axis.weight_parts(layer, num_shards)
    weights, fraction = layer.weights, axis.saved_fraction(layer, num_shards)

    def seconds(
        kind: ActionKind, flops: float, traffic: float, *, of_weights: bool = True
    ) -> float:
        moved = traffic * examples * fraction
        others = moved * device.fusion_factor / device.bandwidth
        if not flops:
            return others
        # A backward reads weights, and reads and writes the sum of gradients.
        sums = 2 * weights.size if kind.is_backward else 0
        products = device.product_seconds(
            kind,
            flops * examples / T,
            rows=examples * layer.positions * parts / T,
            weights=of_weights * weights.count / parts * (dtype_bytes(dtype) + sums),
            dtype=dtype,
        )
        return others + products

    forward, backward = (
        seconds(kind, layer.flops.of(kind), layer.traffic.of(kind))
        for kind in (kinds.FORWARD, kinds.BACKWARD)
    )
    again = None
    if saves_results:
        lost = layer.flops.again, layer.traffic.again
        again = seconds(kinds.FORWARD, *lost, of_weights=False)
    return PassCost(forward, backward, again)


def stage_times(staged: StagedWorkload) -> list[StageTimes]:
    """Returns the times of each stage on a microbatch."""
    config, axis = staged.config, staged.config.shard_axis
    saves = config.remat.saves_results
    parts = memory.recomputed_parts(staged)
    found = []
    for k, (layers, device) in enumerate(
        zip(staged.stages, staged.placed_on, strict=True)
    ):
        sizes: dict[str, Any] = {
            "examples": staged.examples,
            "num_shards": config.num_shards,
            "device": device,
            "dtype": staged.workload.dtype,
        }
        again = config.load.recomputed(k, len(layers))
        part = parts[config.load.placement[k]]
        passes = [
            layer_seconds(x, **sizes, axis=axis, saves_results=saves) for x in layers
        ]
        computed = stage_work(passes, again)
        exchanges = [axis.exchange_seconds(x, **sizes) for x in layers]
        reduced = stage_work(exchanges, again)
        found.append(
            StageTimes(
                forward=computed.forward + device.overhead + reduced.forward,
                backward=computed.backward + device.overhead + reduced.backward,
                recompute=part * (computed.recompute + reduced.recompute),
                reductions=dataclasses.replace(
                    reduced, recompute=part * reduced.recompute
                ),
            )
        )
    return found


def lower_bound_seconds(staged: StagedWorkload) -> float:
    """Returns the seconds that no step is faster than.

    A device begins when a microbatch has passed the stages before, then does all its
    work, and whole backwards go back through those stages at the end.
    """
    config, stages = staged.config, stage_times(staged)
    least = 0.0
    for p in range(config.num_devices):
        mine = config.stages_on(p)
        wait = sum(stage.forward for stage in stages[: min(mine)])
        if len(mine) == 1 and not config.schedule.splits_backwards:
            wait += sum(stage.backward for stage in stages[: min(mine)])
        work = config.num_microbatches * sum(stages[k].total for k in mine)
        least = max(least, wait + work)
    return least + sum(update_times(staged))


def update_times(staged: StagedWorkload) -> tuple[float, float]:
    """Returns the seconds of the all-reduce of gradients and of the weights' update."""
    config, stages = staged.config, staged.stages
    D, P, T = config.num_replicas, config.num_devices, config.num_shards
    axis = config.shard_axis
    amid = _seconds_amid_backwards(staged)
    reduce = update = 0.0
    for p, device in enumerate(staged.devices):
        trained_bytes = sum(
            layer.weights.trained_bytes / axis.weight_parts(layer, T)
            for k in config.stages_on(p)
            for layer in stages[k]
        )
        # Of weights and slots each is read and written, of gradients read.
        updated = trained_bytes * config.slot_share
        traffic = 3 * updated + 2 * trained_bytes * staged.num_slots
        link = device.ring_link(D, stride=P * T)
        ways = 2 if config.weight_share == 1 else 1
        summed = ways / 2 * ring_seconds(trained_bytes, D, link)
        reduce = max(reduce, summed - amid[p])
        update = max(update, traffic / device.bandwidth)
    return reduce, update


def _seconds_amid_backwards(staged: StagedWorkload) -> list[float]:
    """Returns the seconds of sums of gradients that each device does not wait for.

    Sums that start early take place amid the backwards of the last microbatch, beside
    the gathers of weights in slices.
    """
    config = staged.config
    if config.sum_when != "early":
        return [0.0] * config.num_devices
    times = stage_times(staged)
    gathers = [0.0] * config.num_stages
    if config.weight_share < 1:
        gathers = [*map(_gather_seconds(staged), staged.stages)]
    return [
        sum(
            max(times[k].backward + times[k].recompute - gathers[k], 0.0)
            for k in config.stages_on(p)
        )
        for p in range(config.num_devices)
    ]


def stage_costs(staged: StagedWorkload, stages: Sequence[StageTimes]) -> Costs:
    """Returns the costs of stages and transfers, for a simulation."""
    config = staged.config
    num = config.num_devices * config.num_shards
    links = [device.link_across(num) for device in staged.devices]
    copies: dict[str, Any] = {}
    if config.schedule.has_copies:
        held = memory.stages(staged, splits_backwards=config.load.splits_backwards)
        copies = {
            "kept_bytes": [stage.by_time(staged.num_slots)[0] for stage in held],
            "host_bandwidth": min(map(_host_bandwidth, staged.devices)),
        }
    if config.weight_share < 1:
        copies["gathered_bytes"] = [*map(_gather_seconds(staged), staged.stages)]
        copies["gather_bandwidth"] = 1.0
    return Costs(
        **copies,
        forward=[stage.forward for stage in stages],
        backward=[stage.backward for stage in stages],
        recompute=[stage.recompute for stage in stages],
        recompute_when=config.recompute_when,
        boundary_bytes=[
            staged.examples * layers[0].tensors.boundary for layers in staged.stages[1:]
        ],
        bandwidth=min(link.bandwidth for link in links),
        latency=max(link.latency for link in links),
    )


def _gather_seconds(staged: StagedWorkload) -> Callable[[Sequence[LayerCost]], float]:
    """Returns the function from layers to the seconds of a gather of their weights."""
    config, T = staged.config, staged.config.num_shards
    axis, stride = config.shard_axis, config.num_devices * T
    links = [
        device.ring_link(config.num_replicas, stride=stride)
        for device in staged.devices
    ]
    slowest = max(links, key=lambda link: ring_seconds(1e9, config.num_replicas, link))

    def seconds(layers: Sequence[LayerCost]) -> float:
        size = sum(
            layer.weights.bytes / axis.weight_parts(layer, T) for layer in layers
        )
        return ring_seconds(size, config.num_replicas, slowest) / 2

    return seconds


def _host_bandwidth(device: Device) -> float:
    """Returns the bytes a second to the host.

    Raises:
        ValueError: If there is no way.
    """
    if device.host_bandwidth is None:
        raise ValueError(
            "Microbatches wait in the memory of the host. Received a device "
            f"'{device.name}' without a `host_bandwidth`. Describe it with one, or use "
            "another schedule."
        )
    return device.host_bandwidth


def available_bytes(staged: StagedWorkload) -> tuple[float, ...]:
    """Returns the bytes of each device for a pipeline."""
    return tuple(device.memory - device.reserved for device in staged.devices)


def search_costs(staged: StagedWorkload) -> Costs:
    """Returns the costs of stages for the search of an order, with their bytes."""
    held = memory.stages(staged, splits_backwards=True)
    kept, again, fixed = zip(
        *(stage.by_time(staged.num_slots) for stage in held), strict=True
    )
    return dataclasses.replace(
        stage_costs(staged, stage_times(staged)),
        kept_bytes=kept,
        backward_bytes=again,
        fixed_bytes=fixed,
    )


def ordered(staged: StagedWorkload) -> ParallelConfig:
    """Returns the configuration with the schedule that is for its stages.

    It fits the devices, or if none does is the fastest.
    """
    config = staged.config
    for limit in (available_bytes(staged), None):
        order = config.schedule.fitted(lambda: search_costs(staged), limit)
        if order is config.schedule:
            break
        found = dataclasses.replace(config, schedule=order)
        try:
            _ = found.load  # Searches.
        except ValueError:  # Nothing fits the limit.
            continue
        return found
    return config


def pipeline(
    config: ParallelConfig, stages: Sequence[StageTimes], costs: Costs
) -> tuple[float, float]:
    """Returns the seconds of a pipeline, and the share of them that is bubble.

    Long ones are simulated with fewer microbatches, of which each further group takes
    as long as the one before, if the schedule is periodic; if it is searched for, as
    long as the busiest device works.
    """
    M, P = config.num_microbatches, config.num_devices
    if P == 1 and config.weight_share == 1:
        return M * sum(stage.total for stage in stages), 0.0

    def simulated(num_microbatches: int) -> float:
        schedule = config.make_schedule(num_microbatches)
        return simulate(schedule, costs).timeline.step_time

    few, more = 3 * P, 4 * P
    order = config.schedule
    if isinstance(order, Schedule) or more >= M:
        seconds = simulated(M)
    elif not order.is_periodic:
        longest = max(
            sum(stages[k].total for k in config.stages_on(p)) for p in range(P)
        )
        seconds = simulated(more) + (M - more) * longest
    elif 2 * M * len(stages) <= MOST_ACTIONS:
        seconds = simulated(M)
    else:
        short, longer = simulated(few), simulated(more)
        seconds = longer + (M - more) * (longer - short) / P
    busy = M * math.fsum(stage.total for stage in stages)
    return seconds, 1 - busy / (P * seconds)


def step_time(staged: StagedWorkload) -> StepTime:
    """Returns the time of a step."""
    config, stages = staged.config, stage_times(staged)
    P = config.num_devices
    seconds, bubble = pipeline(config, stages, stage_costs(staged, stages))
    replicas, update = update_times(staged)
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
