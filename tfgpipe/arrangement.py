"""Which schedule, on which devices: what a user asked for, made to fit.

Decided before anything is built or moved, so that what does not fit harms nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfgpipe import checks, mesh, schedules
from tfgpipe.schedule import Schedule
from tfgpipe.strategy import PipelineStrategy, current_strategy


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A schedule, and the devices it runs on.

    Attributes:
        schedule: The schedule.
        devices: For each stage the name of its device; None for those of the strategy
            in scope, or for one after the other.
    """

    schedule: Schedule
    devices: tuple[str, ...] | None


def arrange(
    schedule: str | Schedule,
    *,
    num_stages: int | None,
    num_microbatches: int,
    balance: str | Sequence[Any],
    devices: Sequence[str] | None,
) -> Arrangement:
    """Returns a schedule that fits the stages, microbatches and devices.

    Args:
        schedule: A schedule, or the name of one.
        num_stages: K, or None.
        num_microbatches: M.
        balance: A cut, which says how many stages there are, or a quantity.
        devices: Names of devices, or None.

    Raises:
        ValueError: If there is none.
    """
    M = checks.num_microbatches(num_microbatches)
    if isinstance(schedule, Schedule):
        schedule.validate()
        _check_numbers(schedule, num_stages, M)
    strategy = current_strategy()
    chosen: tuple[str, ...] | None = None if devices is None else tuple(devices)
    if isinstance(strategy, PipelineStrategy):
        placement = strategy.mesh.placement
    elif isinstance(schedule, Schedule):
        placement = schedule.placement
        chosen = _dealt(placement, chosen or _first_devices(schedule.num_devices))
    else:
        K = num_stages or _length(balance) or len(chosen or mesh.default_devices())
        placement = tuple(range(K))
        if schedule == "interleaved":
            if num_stages is None and _length(balance) is None:
                raise ValueError(
                    'schedule="interleaved" places several stages on each device. '
                    "Received no `num_stages`. Pass a multiple of the number of "
                    "devices."
                )
            names = chosen or _first_devices(_several_each(K))
            placement = tuple(k % len(names) for k in range(K))
            chosen = _dealt(placement, names)
        elif chosen is not None:
            placement = tuple(map(list(dict.fromkeys(chosen)).index, chosen[:K]))
    made = schedule
    if not isinstance(made, Schedule):
        made = _named(made, placement, M)
    if made.placement != placement:
        raise ValueError(
            f"Schedule '{made.name}' has its stages on devices {made.placement}, by "
            f"number. Received devices that have them on {placement}. Give the "
            "stages' `devices` in the order of the schedule."
        )
    return Arrangement(made, chosen)


def _named(name: str, placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    K = len(placement)
    if name == "gpipe":  # Which any placement will do for.
        return schedules.gpipe(K, num_microbatches).placed(placement)
    return schedules.make(
        name,
        num_stages=K,
        num_microbatches=num_microbatches,
        num_devices=max(placement, default=0) + 1,
    )


def _check_numbers(
    schedule: Schedule, num_stages: int | None, num_microbatches: int
) -> None:
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


def _length(balance: str | Sequence[Any]) -> int | None:
    """Returns how many stages a cut makes, or None of a quantity."""
    if isinstance(balance, str):
        return None
    # Names end all stages but the last.
    return len(balance) + any(isinstance(entry, str) for entry in balance)


def _dealt(placement: tuple[int, ...], names: Sequence[str]) -> tuple[str, ...]:
    """Returns the name of each stage's device."""
    if len(names) != max(placement) + 1:
        raise ValueError(
            f"The schedule is for {max(placement) + 1} devices. Received "
            f"{len(names)}: {', '.join(names)}. Name as many `devices`, or make them: "
            f"`tfgpipe.make_logical_cpus({max(placement) + 1})`."
        )
    return tuple(names[p] for p in placement)


def _first_devices(number: int) -> tuple[str, ...]:
    return tuple(mesh.default_devices()[:number])


def _several_each(num_stages: int) -> int:
    """Returns how many of the devices there are have several stages each."""
    most = min(len(mesh.default_devices()), num_stages // 2)
    fitting = [p for p in range(1, most + 1) if num_stages % p == 0]
    return max(fitting, default=1)
