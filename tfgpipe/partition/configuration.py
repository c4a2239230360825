"""Resolves a configuration: which schedule runs on which devices.

Done before anything is built or moved, so that a wrong request changes nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from tfgpipe import schedules
from tfgpipe._util import argument_checks
from tfgpipe.devices import default_devices, make_mesh
from tfgpipe.distribution import StageStrategy, replica_context
from tfgpipe.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class ResolvedConfig:
    """A schedule with the devices that it runs on: a resolved configuration.

    Attributes:
        schedule: The schedule.
        devices: For each stage the name of its device, or of its shards' devices; None
            to use those of the strategy in scope, or one device after the other.
    """

    schedule: Schedule
    devices: tuple[str, ...] | None


def resolve(
    schedule: str | Schedule,
    *,
    num_stages: int | None,
    num_microbatches: int,
    balance: str | Sequence[Any],
    devices: Sequence[str] | None,
    num_shards: int = 1,
) -> ResolvedConfig:
    """Returns a schedule that fits the stages, microbatches and devices.

    A stage with several devices, one for each shard, counts as one device.

    Args:
        schedule: A schedule, or the name of one.
        num_stages: K, or None.
        num_microbatches: M.
        balance: A partition, which determines K, or a quantity.
        devices: Names of devices, or None.
        num_shards: T, how many of them each stage has.

    Raises:
        ValueError: If no schedule fits.
    """
    M = argument_checks.check_num_microbatches(num_microbatches)
    devices = argument_checks.check_device_names(devices)
    if not isinstance(schedule, str | Schedule):
        raise TypeError(
            "`schedule` must be the name of a schedule, one of "
            f"{', '.join(map(repr, schedules.NAMES))}, or a `tfgpipe.Schedule`. "
            f"Received {schedule!r}. Call a function that makes schedules first."
        )
    if isinstance(schedule, Schedule):
        check_schedule(schedule, num_stages, M)
    strategy = replica_context.current_strategy()
    make_mesh(num_stages=1, num_shards=num_shards)  # Raises if one is too many.
    available = _shard_groups(default_devices(), num_shards)
    chosen = None
    if devices is not None:
        if len(devices) % num_shards:
            raise ValueError(
                f"Stages of {num_shards} shards have as many devices each, next to "
                f"each other in `devices`. Received {len(devices)}: "
                f"{', '.join(devices)}. Name {num_shards} for each stage."
            )
        chosen = _shard_groups(devices, num_shards)
    if isinstance(strategy, StageStrategy):
        placement = strategy.mesh.placement
    elif isinstance(schedule, Schedule):
        placement = schedule.placement
        chosen = _assign_devices(placement, chosen or available[: schedule.num_devices])
    else:
        K = num_stages or _num_stages(balance) or len(chosen or available)
        placement = tuple(range(K))
        if schedule == "interleaved":
            if num_stages is None and _num_stages(balance) is None:
                raise ValueError(
                    'schedule="interleaved" places several stages on each device. '
                    "Received no `num_stages`. Pass a multiple of the number of "
                    "devices."
                )
            most = min(len(available), K // 2)  # Devices of several stages each.
            P = max((p for p in range(1, most + 1) if K % p == 0), default=1)
            groups = chosen or available[:P]
            placement = tuple(k % len(groups) for k in range(K))
            chosen = _assign_devices(placement, groups)
        elif chosen is not None:
            placement = tuple(map(list(dict.fromkeys(chosen)).index, chosen[:K]))
    if schedule == "gpipe":  # Any placement will do.
        schedule = schedules.gpipe(len(placement), M).with_placement(placement)
    elif isinstance(schedule, str):
        schedule = schedules.make(
            schedule,
            num_stages=len(placement),
            num_microbatches=M,
            num_devices=max(placement, default=0) + 1,
        )
    if schedule.placement != placement:
        raise ValueError(
            f"Schedule '{schedule.name}' has its stages on devices "
            f"{schedule.placement}, by index. Received devices that have them on "
            f"{placement}. Give the stages' `devices` in the order of the schedule."
        )
    names = None if chosen is None else tuple(itertools.chain(*chosen))
    return ResolvedConfig(schedule, names)


def check_schedule(
    schedule: Schedule, num_stages: int | None, num_microbatches: int
) -> None:
    """Raises ValueError unless a schedule can run and has this K and M."""
    schedule.validate()
    if num_stages not in (None, schedule.num_stages):
        raise ValueError(
            "A schedule says how many stages there are. Received one of "
            f"{schedule.num_stages} stages, and num_stages={num_stages}."
        )
    if num_microbatches != schedule.num_microbatches:
        raise ValueError(
            f"Schedule '{schedule.name}' is for {schedule.num_microbatches} "
            f"microbatches. Received num_microbatches={num_microbatches}."
        )


def _num_stages(balance: str | Sequence[Any]) -> int | None:
    """Returns the number of stages of a partition, or None for a quantity."""
    if isinstance(balance, str):
        return None
    # Names end all stages but the last.
    return len(balance) + any(isinstance(entry, str) for entry in balance)


def _shard_groups(names: Sequence[str], num_shards: int) -> list[tuple[str, ...]]:
    """Splits device names into groups of `num_shards`, one group for each stage."""
    groups = zip(*(names[t::num_shards] for t in range(num_shards)), strict=False)
    return list(groups)


def _assign_devices(
    placement: tuple[int, ...], groups: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Returns the names of each stage's devices."""
    num_devices, num_shards = max(placement) + 1, len(groups[0])
    if len(groups) != num_devices:
        each = f" x {num_shards} shards" if num_shards > 1 else ""
        names = list(itertools.chain(*groups))
        raise ValueError(
            f"The schedule is for {num_devices} devices{each}. Received "
            f"{len(names)}: {', '.join(names)}. Name as many `devices`, or make them: "
            f"`tfgpipe.make_logical_cpus({num_devices * num_shards})`."
        )
    return [groups[p] for p in placement]
