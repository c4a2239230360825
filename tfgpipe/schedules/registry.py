"""The named schedule policies."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args, overload

from tfgpipe.schedules.gather import Gather
from tfgpipe.schedules.insertion import InsertionPolicy
from tfgpipe.schedules.named.dualpipe_v import DualPipeV
from tfgpipe.schedules.named.eager_1f1b import EagerOneFOneB
from tfgpipe.schedules.named.gpipe import GPipe
from tfgpipe.schedules.named.interleaved import Interleaved
from tfgpipe.schedules.named.interleaved_zb import InterleavedZB
from tfgpipe.schedules.named.looped_bfs import LoopedBFS
from tfgpipe.schedules.named.one_f_one_b import OneFOneB
from tfgpipe.schedules.named.v_half import VHalf
from tfgpipe.schedules.named.v_min import VMin
from tfgpipe.schedules.named.zbv import ZBV
from tfgpipe.schedules.named.zero_bubble import ZeroBubble
from tfgpipe.schedules.offload import Offload
from tfgpipe.schedules.policy import SchedulePolicy
from tfgpipe.schedules.schedule import Schedule

# The name of a policy.
Name = Literal[
    "gpipe",
    "1f1b",
    "interleaved",
    "zero_bubble",
    "looped_bfs",
    "eager_1f1b",
    "interleaved_zb",
    "zbv",
    "v_half",
    "v_min",
    "dualpipe_v",
]
NAMES: tuple[Name, ...] = get_args(Name)
"""The names of all policies."""

_INSERTIONS: tuple[type[InsertionPolicy], ...] = (Offload, Gather)

gpipe = GPipe()
one_f_one_b = OneFOneB()
interleaved = Interleaved()
zero_bubble = ZeroBubble()
_POLICIES: dict[str, SchedulePolicy] = {
    policy.name: policy
    for policy in (
        *(gpipe, one_f_one_b, interleaved, zero_bubble),
        *(LoopedBFS(), EagerOneFOneB(), InterleavedZB()),
        *(ZBV(), VHalf(), VMin(), DualPipeV()),
    )
}


@overload
def find(
    schedule: str, *, others: Mapping[str, SchedulePolicy] = ...
) -> SchedulePolicy: ...
@overload
def find(
    schedule: Any, *, others: Mapping[str, SchedulePolicy] = ...
) -> SchedulePolicy | Schedule: ...
def find(
    schedule: Any, *, others: Mapping[str, SchedulePolicy] = MappingProxyType({})
) -> SchedulePolicy | Schedule:
    """Returns the policy of a name, or the policy or schedule itself.

    >>> tfgpipe.schedules.find("1f1b").in_flight(4, 8, 4)
    (4, 3, 2, 1)

    Args:
        schedule: One of `NAMES`, or one with `+offload` or `+gather` behind it, for
            an `Offload` or a `Gather`; a policy, or a schedule.
        others: Policies of other names.

    Raises:
        TypeError: If it is of another type.
        ValueError: If there is none of this name.
    """
    policies = {**_POLICIES, **others}
    if isinstance(schedule, SchedulePolicy | Schedule):
        return schedule
    names = ", ".join(map(repr, policies))
    if not isinstance(schedule, str):
        raise TypeError(
            f"`schedule` must be the name of a schedule, one of {names}, a "
            "`tfgpipe.schedules.SchedulePolicy`, or a `tfgpipe.Schedule`. Received "
            f"{schedule!r}."
        )
    for insertion in _INSERTIONS:
        if schedule.endswith(insertion.suffix):
            policy = find(schedule.removesuffix(insertion.suffix), others=others)
            return insertion(policy)
    if schedule not in policies:
        raise ValueError(
            f"`schedule` must be one of {names}, or a `tfgpipe.Schedule` of your own. "
            f"Received {schedule!r}."
        )
    return policies[schedule]


def make(
    name: str, *, num_stages: int, num_microbatches: int, num_devices: int | None = None
) -> Schedule:
    """Returns the schedule of a name.

    >>> tfgpipe.schedules.make("1f1b", num_stages=2, num_microbatches=4).name
    '1f1b'

    Args:
        name: One of `NAMES`.
        num_stages: K.
        num_microbatches: M.
        num_devices: P, or None for K.

    Raises:
        ValueError: If there is none of this name, or none for these numbers.
    """
    return find(name)(num_stages, num_microbatches, num_devices=num_devices)
