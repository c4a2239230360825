"""Resolves a configuration: the number of stages, their devices, and the schedule.

Done before anything is built or moved, so that a wrong request changes nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from tfgpipe._util import argument_checks
from tfgpipe.capture import source_model
from tfgpipe.devices import default_devices, sharding
from tfgpipe.distribution import StageStrategy, current_strategy
from tfgpipe.partition.config import PipelineConfig
from tfgpipe.partition.feasibility import check_feasible
from tfgpipe.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration for one model, on devices that there are.

    Attributes:
        strategy: The strategy, with the devices of the stages.
        schedule: The order of actions, on these devices.
        calls_per_stage: The given partition, or None to plan one.
    """

    strategy: StageStrategy
    schedule: Schedule
    calls_per_stage: tuple[int, ...] | None


def resolve(config: PipelineConfig, source: source_model.SourceModel) -> Resolved:
    """Returns the devices and the schedule of a pipeline.

    Raises:
        ValueError: If the model has no such partition, if devices are missing, or if
            the schedule is for other stages, microbatches or devices.
    """
    num_shards = sharding.num_shards(source.calls)
    _check_jit_compile(config.jit_compile, num_shards)
    calls_per_stage, K = _given_stages(config, source)
    devices = _stage_devices(config, K, num_shards)
    strategy = current_strategy().for_pipeline(K, devices, num_shards)
    strategy.check_offload(on_host=config.offload_optimizer)
    K = strategy.mesh.num_stages
    check_feasible(source.calls, K, source.opaque_calls)
    argument_checks.check_schedule_size(K, config.num_microbatches)
    schedule = config.schedule.on(strategy.mesh.placement, config.num_microbatches)
    _check_devices(config, schedule.num_devices)
    return Resolved(strategy, schedule, calls_per_stage)


def resolve_plan(
    config: PipelineConfig, source: source_model.SourceModel
) -> tuple[Schedule, tuple[int, ...] | None]:
    """Returns the schedule of a plan, and the given partition if there is one.

    The plan may be for more devices than there are here.

    Raises:
        ValueError: If the model has no such partition, or the schedule is for others.
    """
    calls_per_stage, K = _given_stages(config, source)
    available = len(default_devices()) // sharding.num_shards(source.calls)
    if K is None:
        K = max(available, 1)
        check_feasible(source.calls, K, source.opaque_calls)
    num_devices = config.schedule.choose_num_devices(K, available)
    placement = config.schedule.deal(K, num_devices)
    _check_devices(config, num_devices)
    return config.schedule.on(placement, config.num_microbatches), calls_per_stage


def _given_stages(
    config: PipelineConfig, source: source_model.SourceModel
) -> tuple[tuple[int, ...] | None, int | None]:
    """Returns the given partition and number of stages, as far as they are given."""
    calls_per_stage, K = None, config.num_stages
    if config.partition is not None:
        calls_per_stage = config.partition.calls_per_stage(source, K)
        K = len(calls_per_stage)
    check_feasible(source.calls, K, source.opaque_calls)
    if K is None and current_strategy().is_distributed:
        K = current_strategy().mesh.num_stages
    K = config.schedule.check_num_stages(K)
    check_feasible(source.calls, K, source.opaque_calls)
    return calls_per_stage, K


def _stage_devices(
    config: PipelineConfig, num_stages: int | None, num_shards: int
) -> Sequence[str] | None:
    """Returns the names of each stage's devices, or None for one after the other."""
    is_distributed = current_strategy().is_distributed
    if config.devices is None:
        groups = _groups(default_devices(), num_shards)
    elif len(config.devices) % num_shards:
        raise ValueError(
            f"Stages of {num_shards} shards have as many devices each, next to each "
            f"other in `devices`. Received {len(config.devices)}: "
            f"{', '.join(config.devices)}. Name {num_shards} for each stage."
        )
    else:
        groups = _groups(config.devices, num_shards)
    schedule = config.schedule
    if is_distributed or num_stages is None or not schedule.deals_stages or not groups:
        return config.devices
    if config.devices is None:
        groups = groups[: schedule.choose_num_devices(num_stages, len(groups))]
    placement = schedule.deal(num_stages, len(groups))
    return [*itertools.chain(*(groups[p] for p in placement))]


def _groups(names: Sequence[str], num_shards: int) -> list[tuple[str, ...]]:
    """Splits device names into groups of `num_shards`, one group for each stage."""
    groups = zip(*(names[t::num_shards] for t in range(num_shards)), strict=False)
    return list(groups)


def _check_devices(config: PipelineConfig, num_devices: int) -> None:
    """Raises ValueError if numbers of each device are of other devices."""
    for name in ("memory_limit", "device_speeds"):
        value = getattr(config, name)
        argument_checks.of_each_device(name, value, num_devices, 0.0)


def _check_jit_compile(jit_compile: bool | str, num_shards: int) -> None:
    """Raises ValueError if XLA is requested for stages on several devices."""
    if jit_compile is True and num_shards > 1:
        raise ValueError(
            "XLA compiles for one device, and a stage in shards is on several. "
            f"Received jit_compile=True with layers in {num_shards} shards. Leave "
            "`jit_compile` out."
        )
