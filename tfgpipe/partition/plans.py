"""Plans: a partition of a model with what each stage costs, made before running."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfgpipe import schedules
from tfgpipe._util import (
    argument_checks,
    layer_names,
    readable_bytes,
    stage_spans,
    text_table,
)
from tfgpipe.capture import TensorKey, tracer
from tfgpipe.costs import LayerCost, PassCost, Weights, profiler, stage_work
from tfgpipe.devices import short_name
from tfgpipe.partition import (
    additive,
    balances,
    feasibility,
    profiles,
    side_by_side,
    solver,
)
from tfgpipe.partition.balances import Balance
from tfgpipe.partition.profiles import CallProfile, PlanSettings
from tfgpipe.simulation import Costs, imbalance, simulate
from tfgpipe.stage import Boundary, codecs

if TYPE_CHECKING:
    from tfgpipe.partition.config import PipelineConfig

# Limits on single stages that are tried where several share a device.
_NUM_LIMITS_TRIED = 12


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        layers: Names of its layers, in order.
        parameters: Numbers in its variables.
        cost: Cost in the plan's quantity.
        flops: Operations of one microbatch: forward, backward and recomputation.
        memory_bytes: Bytes of weights, gradients, slots and activations, of as many
            microbatches as the schedule has in flight; in shards, on the device that
            has most.
        received_bytes: Bytes that come from other stages for one microbatch, compressed
            if they are on their way.
    """

    layers: tuple[str, ...]
    parameters: int
    cost: float
    flops: float
    memory_bytes: float
    received_bytes: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A partition into stages. `print` it for a table.

    Attributes:
        calls_per_stage: The number of calls in each stage, to be given as `partition`.
        quantity: The quantity that is balanced.
        settings: The options of the plan.
        cost_source: Origin of the costs, in words.
        profile: Costs of the calls.
    """

    calls_per_stage: tuple[int, ...]
    quantity: Balance
    settings: PlanSettings
    cost_source: str
    profile: CallProfile = dataclasses.field(repr=False)

    @functools.cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """The layers and costs of each stage."""
        profile, settings = self.profile, self.settings
        return tuple(
            StagePlan(
                layers=tuple(x.name for x in profile.layers[span]),
                parameters=int(sum(x.weights.count for x in profile.layers[span])),
                cost=self.quantity.stage_cost(profile, settings, k, span),
                flops=balances.flops.stage_cost(profile, settings, k, span),
                memory_bytes=profile.stage_memory(settings, k, span.start, span.stop),
                received_bytes=float(profile.received_bytes[span.start, span.stop]),
            )
            for k, span in enumerate(stage_spans(self.calls_per_stage))
        )

    @functools.cached_property
    def device_bytes(self) -> tuple[float, ...]:
        """For each device the bytes that it needs, of all stages that it has."""
        return tuple(size for size, _ in self._filled_devices)

    @functools.cached_property
    def _filled_devices(self) -> tuple[tuple[float, float], ...]:
        """For each device its bytes, and the part of passes that is recomputed."""
        return self.profile.filled_devices(self.settings, self.calls_per_stage)

    @property
    def fullest(self) -> tuple[float, float]:
        """Bytes that the fullest device needs, and those that it has."""
        both = zip(self.device_bytes, self.settings.memory_limits, strict=True)
        limited = self.settings.memory_limit is not None
        return max(both, key=lambda x: x[0] - x[1] if limited else x[0])

    @property
    def imbalance(self) -> float:
        """The largest stage cost over the mean one; 1.0 is even."""
        return imbalance([stage.cost for stage in self.stages])

    @property
    def costs(self) -> Costs:
        """FLOPs, or measured seconds, and bytes of the actions of each stage.

        On devices of other speeds they are divided by these. Transfers are free.
        """
        settings, spans = self.settings, stage_spans(self.calls_per_stage)
        tables, load = self.profile.stage_bytes(settings.remat), settings.load
        measured = self.quantity.is_measured
        works, held = [], []
        for k, span in enumerate(spans):
            layers = self.profile.layers[span]
            speed = settings.speed(k)
            passes = [(x.seconds if measured else x.flops) / speed for x in layers]
            _, part = self._filled_devices[load.placement[k]]
            often = [part * x for x in load.recomputed(k, len(layers))]
            works.append(stage_work(passes, often))
            # Of the shard that needs most.
            stage = tables.at(span.start, span.stop)
            parts = stage.by_time(settings.num_slots)
            held.append([float(np.max(each)) for each in parts])
        kept, again, fixed = zip(*held, strict=True)
        return Costs(
            forward=[x.forward for x in works],
            backward=[x.backward for x in works],
            recompute=[x.recompute for x in works],
            kept_bytes=kept,
            backward_bytes=again,
            fixed_bytes=fixed,
        )

    def ordered(self) -> Plan:
        """Returns the plan with the schedule that is for its stages and data flow."""
        settings = self.settings
        order = settings.order.fitted(lambda: self.costs, settings.memory_limit)
        before = settings.schedule
        flow = self.profile.flow.grouped(self.calls_per_stage)
        if order is settings.order and flow == before.data_flow:
            return self
        schedule = order.on(before.placement, before.num_microbatches, flow)
        settings = dataclasses.replace(settings, schedule=schedule)
        return dataclasses.replace(self, settings=settings)

    def under(self, config: PipelineConfig, num_devices: int) -> Plan:
        """Returns the best plan of the same costs with other options.

        Args:
            config: The options, with as many microbatches. Stages are counted.
            num_devices: P, the number of devices.

        Raises:
            ValueError: If there is none, or none within the memory limit.
        """
        order, K = config.schedule, config.num_stages or 1
        placement = order.deal(K, num_devices)
        schedule = order.on(placement, config.num_microbatches)
        settings = config.plan_settings(schedule, self.settings.num_slots, order=order)
        plan = best_plan(self.profile, self.quantity, settings, note=self.cost_source)
        return check_memory(plan.ordered())

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they wait, by the schedule.

        A backward counts as two forwards. Of even stages under GPipe's schedule it is
        the (K - 1) / (M + K - 1) of Huang et al. 2019, section 2.3.
        """
        cost = [stage.cost for stage in self.stages]
        if not any(cost):
            return 0.0
        costs = Costs(forward=[c / 3 for c in cost], backward=[2 * c / 3 for c in cost])
        return simulate(self.settings.schedule, costs).timeline.bubble

    def rebalance(self, measured: Sequence[float]) -> Plan:
        """Returns the plan for measured stage times.

        The time of a stage is distributed over its calls in proportion to their costs.
        Give the result to `PipelinedLayer.recut` to change a model that runs.

        Args:
            measured: For each stage the time that it took, in any unit.

        Raises:
            ValueError: If there is not one positive number for each stage.
        """
        if len(measured) != len(self.calls_per_stage) or min(measured) <= 0:
            raise ValueError(
                "`measured` holds a positive time for each stage. Received "
                f"{list(measured)} for {len(self.calls_per_stage)} stages. Measure "
                "each stage, forward and backward, over the same microbatches."
            )
        planned = self.quantity.call_costs(self.profile, self.settings)
        scaled: list[LayerCost] = []
        spans = stage_spans(self.calls_per_stage)
        for k, (span, seconds) in enumerate(zip(spans, measured, strict=True)):
            costs = planned[span] if any(planned[span]) else [1.0] * len(planned[span])
            unit = seconds * self.settings.speed(k) / sum(costs)
            scaled += [
                dataclasses.replace(layer, seconds=PassCost(backward=unit * cost))
                for layer, cost in zip(self.profile.layers[span], costs, strict=True)
            ]
        profile = dataclasses.replace(self.profile, layers=tuple(scaled))
        note = "balanced by measured stage times"
        return best_plan(profile, balances.time, self.settings, note=note).ordered()

    def __str__(self) -> str:
        settings, schedule = self.settings, self.settings.schedule
        work = self.quantity.column
        header = ("stage", "layers", "parameters", work, "memory", "receives", "share")
        total = sum(stage.cost for stage in self.stages)
        rows = [
            (
                str(k),
                layer_names(stage.layers),
                f"{stage.parameters:,}",
                self.quantity.work_text(cost=stage.cost, flops=stage.flops),
                readable_bytes(stage.memory_bytes),
                readable_bytes(stage.received_bytes),
                f"{100 * stage.cost / total:.1f}%" if total else "-",
            )
            for k, stage in enumerate(self.stages)
        ]
        most, limit = self.fullest
        fits = "" if math.isinf(limit) else f" of {readable_bytes(limit)}"
        options = ""
        if schedule.name != schedules.gpipe.name:
            options = f"schedule={schedule.name}, "
        if settings.codec != codecs.find(None):
            options += f"transfer_dtype={settings.codec}, "
        shards = len(self.profile.shards)
        each = f" in {shards} shards" if shards > 1 else ""
        if schedule.num_devices < settings.num_stages:
            each = f" on {schedule.num_devices} devices{each}"
        return "\n".join(
            [
                f"{settings.num_stages} stages{each}, {settings.num_microbatches} "
                f"microbatches of {self.profile.num_examples} examples, "
                f"remat={settings.remat}, {options}{self.cost_source}",
                text_table(header, rows, left=("layers", "stage")),
                f"imbalance {self.imbalance:.3f}, bubble {100 * self.bubble:.1f}%, "
                f"{readable_bytes(most)}{fits} on the fullest device",
                *([self.profile.sharding] if self.profile.sharding else []),
            ]
        )


def make_plan(
    captured: tracer.CapturedModel,
    balance: Balance | Sequence[int],
    settings: PlanSettings,
    *,
    sample: Sequence[tf.Tensor | None] | None,
    batch_size: int,
    devices: Sequence[str],
) -> Plan:
    """Makes a plan.

    Args:
        captured: The model.
        balance: The quantity to balance, or the number of calls of each stage.
        settings: The options of the plan.
        sample: A mini-batch, one tensor an input, or None for `batch_size` rows of the
            sizes in the model, of noise where time is measured.
        batch_size: The size of the mini-batch, if the model leaves it open.
        devices: Device to measure time on, or each of the P, to measure their speeds.

    Raises:
        ValueError: If the model has no such partition, or a size is not known.
    """
    argument_checks.check_count("batch_size", batch_size)
    argument_checks.check_count("num_slots", settings.num_slots, least=0)
    called = [call.layer for call in captured.graph.calls]
    feasibility.check_feasible(called, settings.num_stages, captured.opaque_calls)
    is_measured = isinstance(balance, Balance) and balance.is_measured
    profile = profiles.profile_calls(
        captured.graph,
        example_microbatch(
            captured, sample, batch_size, num_microbatches=settings.num_microbatches
        ),
        codec=settings.codec,
        devices=devices if is_measured else (),
        remat=settings.remat,
    )
    if not isinstance(balance, Balance):
        note = "partition as given"
        return Plan(tuple(balance), balances.flops, settings, note, profile).ordered()
    note = f"balanced by {balance}"
    if is_measured:
        names = ", ".join(map(short_name, devices))
        note += f", the best of {profiler.REPEATS} runs of a layer on {names}"
    if len(devices) > 1:
        settings = dataclasses.replace(settings, speeds=profile.speeds)
        note += f", of speeds {', '.join(f'{x:.2f}' for x in profile.speeds)}"
    return best_plan(profile, balance, settings, note=note).ordered()


def example_microbatch(
    captured: tracer.CapturedModel,
    sample: Sequence[tf.Tensor | None] | None,
    batch_size: int,
    *,
    num_microbatches: int,
) -> dict[TensorKey, tf.Tensor | tf.TensorSpec]:
    """Returns the first microbatch of a sample, or its shapes and types."""
    ids = captured.graph.input_ids
    inputs = sample or [captured.specs[i] for i in ids]
    tensors = {
        TensorKey(i): x for i, x in zip(ids, inputs, strict=True) if x is not None
    }
    batch = next(iter(tensors.values())).shape[0] or batch_size
    rows = math.ceil(batch / num_microbatches)
    if sample is not None:
        return {key: x[:rows] for key, x in tensors.items()}
    for x in tensors.values():
        if None in x.shape[1:]:
            raise ValueError(
                "Costs depend on all sizes but that of the batch. Received an input "
                f"'{x.name}' of shape {x.shape}. Plan with a mini-batch, "
                "`tfgpipe.plan(..., sample=x)`, and pass "
                '`partition=plan.calls_per_stage` and, in place of schedule="auto", '
                "`schedule=plan.settings.schedule`."
            )
    return {
        key: tf.TensorSpec([rows, *x.shape[1:]], x.dtype) for key, x in tensors.items()
    }


def check_memory(plan: Plan) -> Plan:
    """Returns a plan after checking its memory against the limit.

    Raises:
        ValueError: If a device needs more.
    """
    need, limit = plan.fullest
    if need > limit:
        raise ValueError(
            f"This partition needs {need:,.0f} bytes on one device, "
            f"{need - limit:,.0f} more than `memory_limit`. Received "
            f"partition={list(plan.calls_per_stage)} and "
            f'memory_limit={limit:,.0f}. Use balance="memory", more stages, more '
            "microbatches, or remat."
        )
    return plan


def best_plan(
    profile: CallProfile, quantity: Balance, settings: PlanSettings, *, note: str
) -> Plan:
    """Returns the plan with the least bottleneck of a quantity.

    Where stages share devices, the memory of a device is a sum over stages, which is in
    no table of single stages. Then it is the best plan found: see
    `_search_shared_devices`.
    """
    search = functools.partial(
        solver.best_partition,
        quantity.solver_costs(profile, settings),
        num_stages=settings.num_stages,
        received_bytes=profile.received_bytes,
        memory=profile.stage_memory_tables(settings),
        may_start=[x.may_start for x in profile.layers],
        slack=quantity.slack,
    )
    if settings.schedule.num_devices == settings.num_stages:
        counts = search(memory_limit=settings.largest_memory)
        if not quantity.is_memory:
            counts = _with_branches_apart(counts, profile, quantity, settings)
    else:
        counts = _search_shared_devices(search, profile, quantity, settings)
    return Plan(counts, quantity, settings, note, profile)


def _with_branches_apart(
    counts: tuple[int, ...],
    profile: CallProfile,
    quantity: Balance,
    settings: PlanSettings,
) -> tuple[int, ...]:
    """Returns the partition whose stages begin with a branch, if that is faster."""
    found = side_by_side.with_branches_apart(
        counts,
        quantity.call_costs(profile, settings),
        profile.flow,
        num_microbatches=settings.num_microbatches,
        may_start=[x.may_start for x in profile.layers],
        new_row=lambda: lambda s, e: profile.received_bytes[s, s + 1 : e + 1],
    )
    if found == counts or settings.memory_limit is None:
        return found
    needs = zip(
        profile.device_bytes(settings, found), settings.memory_limits, strict=True
    )
    return found if all(need <= limit for need, limit in needs) else counts


def _search_shared_devices(
    search: Callable[..., tuple[int, ...]],
    profile: CallProfile,
    quantity: Balance,
    settings: PlanSettings,
) -> tuple[int, ...]:
    """Returns the best partition found whose devices, with several stages each, fit.

    Limits on single stages are bisected for the loosest whose best partition fits. The
    leanest partition is found by local search on the fullest device.
    """
    limit, starts = settings.largest_memory, [x.may_start for x in profile.layers]

    def devices(counts: tuple[int, ...]) -> list[float]:
        each = enumerate(profile.device_bytes(settings, counts))
        return sorted((n + settings.bytes_in_use(p) for p, n in each), reverse=True)

    if not quantity.is_memory:
        counts = search()
        if limit is None or devices(counts)[0] <= limit:
            return counts
    lean = solver.best_partition(
        profile.stage_memory_tables(settings),
        num_stages=settings.num_stages,
        may_start=starts,
    )
    tightest = max(
        profile.stage_memory(settings, k, span.start, span.stop)
        + settings.bytes_in_use(settings.schedule.placement[k])
        for k, span in enumerate(stage_spans(lean))
    )
    lean = solver.local_search(lean, devices, may_start=starts)
    most = devices(lean)[0]
    if limit is None:
        return lean
    if most > limit:
        raise ValueError(
            f"No partition into {settings.num_stages} stages on "
            f"{settings.schedule.num_devices} devices was found that stays "
            f"within `memory_limit`. Received memory_limit={limit:,} bytes; the "
            f"leanest partition found needs {math.ceil(most):,} bytes on one device. "
            "Try fewer stages on each device, more microbatches, or remat."
        )
    if quantity.is_memory:
        return lean
    counts, high = lean, limit
    for _ in range(_NUM_LIMITS_TRIED):
        middle = (tightest + high) / 2
        found = search(memory_limit=middle)
        if devices(found)[0] <= limit:
            counts, tightest = found, middle
        else:
            high = middle
    return counts


def plan_by_weights(
    captured: tracer.CapturedModel, balance: Balance, settings: PlanSettings
) -> tuple[int, ...]:
    """Returns the number of calls of each stage, by a cost that needs no trace.

    The partition that `make_plan` finds, without tracing anything: sizes of values are
    those of the captured model, unknown ones counted as one.
    """
    graph = captured.graph
    called = [call.layer for call in graph.calls]
    feasibility.check_feasible(called, settings.num_stages, captured.opaque_calls)
    boundary = Boundary(settings.codec, graph.output_ids)
    layers = [
        LayerCost(name=layer.name, weights=Weights(w.parameters))
        for layer, w in zip(called, profiler.call_weights(graph), strict=True)
    ]
    costs, may_start = [*map(balance.layer_cost, layers)], profiler.may_start(called)
    sizes = boundary.encoded_bytes(captured.specs)
    counts = additive.best_additive_partition(
        costs,
        num_stages=settings.num_stages,
        received_row=graph.received_row(sizes),
        may_start=may_start,
    )
    if settings.schedule.num_devices < settings.num_stages:
        return counts
    return side_by_side.with_branches_apart(
        counts,
        costs,
        graph.flow,
        num_microbatches=settings.num_microbatches,
        may_start=may_start,
        new_row=lambda: graph.received_row(sizes),
    )
