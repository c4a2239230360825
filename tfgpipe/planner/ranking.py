"""Search of parallel configurations: the fastest, and why the others are rejected.

All configurations are enumerated and partitioned. Those that do not fit are rejected
first, since memory is a formula. The rest are simulated in the order of a lower bound
of their step time, until none of those left can be among the best: the result is that
of simulating all.
"""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from tfgpipe import remat as remat_lib
from tfgpipe import schedules
from tfgpipe._util import argument_checks, readable_count, text_table
from tfgpipe.planner import devices, split_vocabulary
from tfgpipe.planner.devices import GIB, Device
from tfgpipe.planner.parallel_config import (
    REMATS,
    ParallelConfig,
    enumerate_configs,
)
from tfgpipe.planner.plan_request import Estimate, PlanRequest
from tfgpipe.planner.workload import Workload
from tfgpipe.remat import RematLike
from tfgpipe.simulation import AutoSchedule, ScheduleName, find_schedule

if TYPE_CHECKING:
    import keras

# Attributes by which rejected configurations are grouped, in the order of the report.
GROUPS = {
    "D": "num_replicas",
    "K": "num_devices",
    "T": "num_shards",
    "shard_axis": "shard_axis.name",
    "schedule": "schedule.name",
    "remat": "remat.name",
}
HEADER = (
    *("D", "K", "T", "M", "schedule", "remat"),
    *("step ms", "MFU", "bubble", "GiB a device", "most of it"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rejected:
    """A group of configurations of which none is among the best.

    Attributes:
        name: Such as `"T=8"`.
        config: The best of them; or the leanest, if none fits; None if there is none.
        reason: The reason for which it is not.
    """

    name: str
    config: ParallelConfig | None
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search. `print` it for a table.

    Attributes:
        request: The model and the devices.
        best: The fastest that fit, the first first; empty if nothing fits.
        rejected: Groups of the others by `name`, such as `"K=1"`, each with its best
            `config` and the `reason` for which it is not among them.
        closest: The configuration that needs least of those that do not fit; None if
            all fit.
        num_configs: Number of configurations.
        num_fitting: Number of those that fit.
    """

    request: PlanRequest
    best: tuple[Estimate, ...]
    rejected: tuple[Rejected, ...]
    closest: Estimate | None
    num_configs: int
    num_fitting: int

    @property
    def missing_bytes(self) -> float:
        """Bytes that a device lacks at least, 0 if something fits."""
        if self.best or self.closest is None:
            return 0.0
        return self.closest.missing_bytes

    def __str__(self) -> str:
        request = self.request
        workload = request.workload
        devices = " and ".join(f"{n} x {kind.name}" for kind, n in request.kinds)
        lines = [
            f"{workload.name} on {devices}: "
            f"{readable_count(workload.parameters)} parameters, "
            f"{readable_count(workload.flops * request.batch_size)}FLOP a step of "
            f"{request.batch_size} examples in {workload.dtype}"
        ]
        if not self.best and self.closest is not None:
            lines.append(
                f"Nothing fits: the leanest of {self.num_configs:,} configurations "
                f"lacks {self.missing_bytes / GIB:.1f} GiB on its fullest device. "
                f"{self.closest.config} {_too_large(self.closest)}. Try more "
                "devices, a smaller batch, or half precision."
            )
        if not self.best:
            return "\n".join(lines)
        rows = [_row(each) for each in self.best]
        width = max((len(each.name) for each in self.rejected), default=0)
        lines += [
            text_table(HEADER, rows, left=("schedule", "remat", "most of it")),
            f"{self.num_fitting:,} of {self.num_configs:,} configurations fit into "
            f"{' and '.join(f'{x.memory / GIB:.0f}' for x, _ in request.kinds)} GiB.",
            *(
                ["Why others were rejected, each with its best configuration:"]
                if width
                else []
            ),
            *(
                f"  {each.name:{width}}  {each.reason}"
                + (f" ({each.config})" if each.config else "")
                for each in self.rejected
            ),
        ]
        return "\n".join(lines)


def search(
    model: Workload | keras.Model | Callable[[], keras.Model],
    *,
    device: Device | str | Sequence[Device | str],
    num_devices: int | Sequence[int],
    batch_size: int,
    num_slots: float = 2,
    names: Sequence[ScheduleName] = schedules.NAMES,
    remats: Sequence[RematLike] = REMATS,
    microbatches: Sequence[int] | None = None,
    num_best: int = 5,
    splits_vocabulary: bool = False,
) -> SearchResult:
    """Returns the fastest configurations that fit, and why the others are rejected.

    What does not fit is tried with slots that replicas share out
    (`shard_replicas="slots"`), and 1F1B with microbatches that wait on the host, if
    devices have a `host_bandwidth`. Where slots are not enough, weights are in slices
    as well (`"weights"`), which are gathered for several stages on each device in turn
    (`"looped_bfs+gather"`), also on one device a replica.

    Example:

    >>> from tfgpipe import planner
    >>> model = planner.transformer(
    ...     name="8B", num_layers=32, width=4096, mlp_width=16384, num_heads=32,
    ...     length=2048, vocabulary=50304, dtype="bfloat16",
    ... )
    >>> result = planner.search(
    ...     model, device="h100-80g", num_devices=16, batch_size=256
    ... )
    >>> bool(result.best[0].fullest.total <= 80 * 2**30)
    True

    Args:
        model: The model: a workload, a Functional or Sequential Keras model, or a
            function that returns one, which then never has weights: see
            `tfgpipe.planner.read`.
        device: The kind of device, or its name in `tfgpipe.planner.TABLE`; or several,
            of which each pipeline has as many as in proportion, the first first.
        num_devices: D x K x T, replicas by stages by shards; of several kinds, each.
        batch_size: Examples of a mini-batch, over all replicas.
        num_slots: Optimizer slots of a trained weight: 2 for Adam, 1 for momentum, one
            more for averaged weights and for gradients summed over steps.
        names: Schedules to try. With `"auto"`, the best found are also tried in the
            orders that a search finds for their stages, which takes seconds each.
        remats: Rematerialisation policies to try.
        microbatches: Values of M to try. None for all powers of two.
        num_best: Number of configurations to return.
        splits_vocabulary: True to try the best of each K also with the head over all
            devices of a pipeline, as `tfgpipe.layers.SplitVocabulary` has it, in some
            seconds each; of a workload that ends in its head.

    Raises:
        ValueError: If a number is below 1, no configuration divides the batch, or the
            device is not known.
    """
    remats = [remat_lib.find(remat, argument="remats") for remat in remats]
    orders = [find_schedule(name) for name in names]
    searched = [order for order in orders if isinstance(order, AutoSchedule)]
    for count in microbatches or ():
        argument_checks.check_count("microbatches", count)
    argument_checks.check_count("num_best", num_best)
    if not isinstance(model, Workload):
        from tfgpipe.planner import models

        model = models.read(model)
    workload = model
    (kind, count), *more = _kinds(device, num_devices)
    request = PlanRequest(
        workload,
        device=kind,
        num_devices=count,
        batch_size=batch_size,
        num_slots=num_slots,
        more=tuple(more),
    )
    fitting: list[tuple[float, ParallelConfig]] = []
    out_of_memory: list[tuple[float, ParallelConfig]] = []
    all_fitting: set[ParallelConfig] = set()
    for config in enumerate_configs(
        num_devices=request.total_devices,
        batch_size=batch_size,
        max_stages=workload.max_stages,
        max_shards=workload.max_shards,
        max_parts=workload.max_parts,
        names=[x for x in orders if x not in searched] or schedules.NAMES,
        remats=remats,
        microbatches=microbatches,
    ):
        if not request.has_devices(config):
            continue
        if config.remat.fills_memory and _saving_all(config) in all_fitting:
            continue  # It would save all.
        layers_per_stage = request.partition(config)
        held = request.memory(config, layers_per_stage)
        missing = request.missing_bytes(config, held)
        if missing <= 0:
            fitting.append(
                (request.lower_bound_seconds(config, layers_per_stage), config)
            )
            all_fitting.add(config)
        else:
            out_of_memory.append((missing, config))
            leaner = [*_leaner(request, config, all_fitting)]
            fitting += leaner
            all_fitting.update(found for _, found in leaner)
    if not fitting and not out_of_memory:
        raise ValueError(
            "Each of D replicas takes as many examples, in M microbatches of as many. "
            f"Received batch_size={batch_size} for {request.total_devices} devices "
            "and a model "
            f"of at most {workload.max_stages} stages and {workload.max_shards} "
            f"shards, microbatches={microbatches or 'powers of two'}: no configuration "
            "divides it. Use a multiple of the devices; of several kinds, numbers that "
            "pipelines can have in proportion."
        )
    fitting.sort(key=lambda pair: pair[0])
    out_of_memory.sort(key=lambda pair: pair[0])
    best, split = _fastest(request, fitting, num_best), []
    for order in searched:
        tried = _in_order(request, best, order)
        fitting += [(x.time.total, x.config) for x in tried]
        best = sorted([*best, *tried], key=lambda x: x.time.total)[: len(best)]
    if splits_vocabulary:
        split = _with_split_vocabulary(request, fitting, out_of_memory)
        best = sorted([*best, *split], key=lambda x: x.time.total)[:num_best]
    return SearchResult(
        request=request,
        best=tuple(best),
        rejected=(
            *_rejected(request, best, fitting, out_of_memory),
            *_rejected_vocabulary(best, split),
        ),
        closest=request.estimate(out_of_memory[0][1]) if out_of_memory else None,
        num_configs=len(fitting) + len(out_of_memory) + len(split),
        num_fitting=len(fitting) + len(split),
    )


def _saving_all(config: ParallelConfig) -> ParallelConfig:
    """Returns a configuration whose backwards recompute nothing."""
    return dataclasses.replace(config, remat=remat_lib.find("none"))


def _leaner(
    request: PlanRequest, config: ParallelConfig, fitting: Collection[ParallelConfig]
) -> Iterator[tuple[float, ParallelConfig]]:
    """Yields the first way to need less memory with which a configuration fits.

    Replicas share out slots, or with 1F1B microbatches wait on the host; or replicas
    have slices of weights.
    """
    ways = []
    if config.num_replicas > 1:
        ways.append(dataclasses.replace(config, shard_replicas="slots"))
    if (
        config.schedule == schedules.one_f_one_b
        and config.num_devices > 1
        and None not in request.host_bandwidths(config)
    ):
        order = schedules.Offload(config.schedule)
        ways += [dataclasses.replace(x, schedule=order) for x in (config, *ways)]
    ways += _in_slices(config, request.workload.max_stages)
    for way in ways:
        if config.remat.fills_memory and _saving_all(way) in fitting:
            return  # It would save all.
        layers_per_stage = request.partition(way)
        if request.fits(way, request.memory(way, layers_per_stage)):
            yield request.lower_bound_seconds(way, layers_per_stage), way
            return


def _in_slices(config: ParallelConfig, max_stages: int) -> list[ParallelConfig]:
    """Returns a configuration with weights in slices, in fewer stages and more.

    For a schedule of one stage on a device they would be whole throughout.
    """
    order, P = find_schedule("looped_bfs"), config.num_devices
    if config.num_replicas == 1 or (P > 1 and config.schedule != order):
        return []
    assert isinstance(order, schedules.SchedulePolicy)
    nums = [config.stages_per_device]
    if P == 1:
        nums = sorted({min(2**i, max_stages) for i in range(2, 11)})
    return [
        dataclasses.replace(
            config,
            schedule=schedules.Gather(order),
            stages_per_device=v,
            shard_replicas="weights",
        )
        for v in nums
    ]


def _fastest(
    request: PlanRequest, fitting: Sequence[tuple[float, ParallelConfig]], num_best: int
) -> list[Estimate]:
    """Returns the fastest configurations, of those in the order of their bounds."""
    best: list[Estimate] = []
    for least, config in fitting:
        if len(best) == num_best and least >= best[-1].time.total:
            break
        bisect.insort(best, request.estimate(config), key=lambda p: p.time.total)
        del best[num_best:]
    return best


def _in_order(
    request: PlanRequest, best: Sequence[Estimate], order: AutoSchedule
) -> list[Estimate]:
    """Returns those of several devices in the order for their stages, if that fits."""
    found: dict[ParallelConfig, Estimate] = {}
    for estimate in best:
        config = dataclasses.replace(estimate.config, schedule=order)
        if config.num_devices > 1 and config not in found:
            found[config] = request.estimate(config, estimate.layers_per_stage)
    return [x for x in found.values() if x.missing_bytes <= 0]


def _with_split_vocabulary(
    request: PlanRequest,
    fitting: Sequence[tuple[float, ParallelConfig]],
    out_of_memory: Sequence[tuple[float, ParallelConfig]],
) -> list[Estimate]:
    """Returns those that fit with the head over all devices of a pipeline.

    Tried are the fastest of each K, or if none fits the leanest.
    """
    found = []
    for K in sorted({x.num_devices for _, x in (*fitting, *out_of_memory)} - {1}):
        mine, others = (
            [x for x in some if x[1].num_devices == K and x[1].weight_share == 1]
            for some in (fitting, out_of_memory)
        )
        tried = [x.config for x in _fastest(request, mine, 1)]
        for config in tried or [x for _, x in others[:1]]:
            found.append(split_vocabulary.with_split_vocabulary(request, config))
    return [x for x in found if x.missing_bytes <= 0]


def _rejected_vocabulary(
    best: Sequence[Estimate], split: Sequence[Estimate]
) -> Iterator[Rejected]:
    """Yields the fastest with a split vocabulary, if none is among the best."""
    if split and not any(x in best for x in split):
        found = min(split, key=lambda x: x.time.total)
        reason = _slower(found, best[0])
        yield Rejected(name="vocabulary=split", config=found.config, reason=reason)


def _rejected(
    request: PlanRequest,
    best: Sequence[Estimate],
    fitting: Sequence[tuple[float, ParallelConfig]],
    out_of_memory: Sequence[tuple[float, ParallelConfig]],
) -> Iterator[Rejected]:
    """Yields each group of which none is among the best, with the reason."""
    if not best:
        return
    if all(config.num_shards == 1 for _, config in (*fitting, *out_of_memory)):
        yield Rejected(
            name="T>1",
            config=None,
            reason="no layer can be in a number of shards that divides the devices",
        )
    for name, attribute in GROUPS.items():
        group = operator.attrgetter(attribute)
        among_best = {group(estimate.config) for estimate in best}
        others = {
            group(config) for _, config in (*fitting, *out_of_memory)
        } - among_best
        for value in sorted(others):
            mine = [pair for pair in fitting if group(pair[1]) == value]
            if mine:
                found = _fastest(request, mine, 1)[0]
                reason = _slower(found, best[0])
            else:
                smallest = next(x for _, x in out_of_memory if group(x) == value)
                found = request.estimate(smallest)
                reason = _too_large(found)
            yield Rejected(name=f"{name}={value}", config=found.config, reason=reason)


def _slower(found: Estimate, best: Estimate) -> str:
    """Says how much slower an estimate is, and where that time goes."""
    times = found.time.total / best.time.total
    shares, usual = found.time.shares, best.time.shares
    seconds = {
        what: found.time.total * shares[what] - best.time.total * usual[what]
        for what in shares
    }
    # Small products are slow ones.
    seconds["the same arithmetic in smaller or more uneven pieces"] = (
        found.time.arithmetic - best.time.arithmetic
    )
    what = max(seconds, key=lambda each: seconds[each])
    share = shares.get(what)
    most = f"{100 * share:.0f}% of it is {what}" if share else f"most of that is {what}"
    return f"{times:.2f} x the best step; {most}"


def _kinds(
    device: Device | str | Sequence[Device | str], num_devices: int | Sequence[int]
) -> list[tuple[Device, int]]:
    """Returns the kinds of devices with the number of each."""
    kinds = [device] if isinstance(device, Device | str) else [*device]
    counts = [*num_devices] if isinstance(num_devices, Sequence) else [num_devices]
    if len(kinds) != len(counts) or not kinds:
        raise ValueError(
            "There is a number of devices of each kind. Received "
            f"num_devices={num_devices} for device={device}."
        )
    found = (devices.find(x) if isinstance(x, str) else x for x in kinds)
    return [*zip(found, counts, strict=True)]


def _too_large(found: Estimate) -> str:
    """Says what an estimate needs that its fullest device does not have."""
    held = found.fullest
    parts = sorted(held.parts.items(), key=lambda part: -part[1])[:2]
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    return (
        f"needs {held.total / GIB:.1f} GiB of {found.capacity / GIB:.0f}, at the "
        "least: "
        f"{named}"
    )


def memory_table(estimate: Estimate) -> str:
    """Returns a table of what each device of a pipeline holds, in GiB."""
    names = list(estimate.fullest.parts)
    return text_table(
        ("device", *names, "total"),
        [
            (
                str(p),
                *(f"{size / GIB:.2f}" for size in held.parts.values()),
                f"{held.total / GIB:.2f}",
            )
            for p, held in enumerate(estimate.memory)
        ],
        left=(),
    )


def _row(estimate: Estimate) -> tuple[str, ...]:
    config, time, held = estimate.config, estimate.time, estimate.fullest
    return (
        str(config.num_replicas),
        str(config.num_devices),
        config.shards,
        str(config.num_microbatches),
        config.order,
        str(config.remat),
        f"{1e3 * time.total:,.1f}",
        f"{100 * estimate.mfu:.1f}%",
        f"{100 * time.bubble:.1f}%",
        f"{held.total / GIB:.1f}",
        held.largest,
    )
