"""Parallel configurations: D x K x T devices, microbatches, schedule, remat."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from tfgpipe import remat as remat_lib
from tfgpipe import schedules
from tfgpipe.costs import StepLoad
from tfgpipe.remat import Remat, RematLike
from tfgpipe.schedules import Schedule

# The policies that a search tries.
REMATS: tuple[remat_lib.Name, ...] = ("none", "stage", "layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Replicas x stages x shards, and how a pipeline runs.

    Attributes:
        num_replicas: D.
        num_devices: K, the devices of a pipeline, in a row.
        num_shards: T.
        num_microbatches: M.
        schedule: The order of actions, or its name.
        remat: The rematerialisation policy, or its name.
        stages_per_device: v; above 1 for `"interleaved"` alone.
        recompute_when: Start of recomputation, as in `tfgpipe.Costs`. This library
            recomputes when asked.
    """

    num_replicas: int
    num_devices: int
    num_shards: int
    num_microbatches: int
    schedule: schedules.Name | Schedule
    remat: Remat
    stages_per_device: int = 1
    recompute_when: Literal["asked", "early"] = "asked"

    def __post_init__(self) -> None:
        object.__setattr__(self, "remat", remat_lib.find(self.remat))

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline, all of each device."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.num_stages
        return self.num_devices * self.stages_per_device

    @property
    def order(self) -> str:
        """The schedule, with the number of stages a device if that is not 1."""
        v, schedule = self.stages_per_device, self.schedule
        name = schedule.name if isinstance(schedule, Schedule) else schedule
        return name if v == 1 else f"{name} x {v}"

    @property
    def total_devices(self) -> int:
        """D x K x T."""
        return self.num_replicas * self.num_devices * self.num_shards

    def make_schedule(self, num_microbatches: int | None = None) -> Schedule:
        """Returns the actions, of another number of microbatches if one is given."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        return _make_schedule(
            self.schedule,
            self.num_stages,
            num_microbatches or self.num_microbatches,
            self.num_devices,
        )

    @functools.cached_property
    def load(self) -> StepLoad:
        """Microbatches that each stage holds and recomputes.

        After as many groups of microbatches as there are devices, what a named schedule
        holds goes on as it grew.
        """
        M, P = self.num_microbatches, self.num_devices
        if isinstance(self.schedule, Schedule) or M <= 4 * P:
            return StepLoad.of(self.make_schedule(), self.remat)
        few, more = (StepLoad.of(self.make_schedule(n * P), self.remat) for n in (3, 4))
        return more.continued(few, M)

    def stages_on(self, p: int) -> Sequence[int]:
        """Returns the stages on device p."""
        return [k for k, q in enumerate(self.load.placement) if q == p]

    def __str__(self) -> str:
        return (
            f"D={self.num_replicas} K={self.num_devices} T={self.num_shards} "
            f"M={self.num_microbatches} {self.order} remat={self.remat}"
        )


@functools.lru_cache(maxsize=16)
def _make_schedule(
    name: schedules.Name, num_stages: int, num_microbatches: int, num_devices: int
) -> Schedule:
    return schedules.make(
        name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_devices=num_devices,
    )


def enumerate_configs(
    *,
    num_devices: int,
    batch_size: int,
    max_stages: int,
    max_shards: int,
    names: Sequence[schedules.Name] = schedules.NAMES,
    remats: Sequence[RematLike] = REMATS,
    microbatches: Sequence[int] | None = None,
) -> Iterator[ParallelConfig]:
    """Yields all configurations of so many devices.

    Microbatches are of equal numbers of examples. On one device, only the schedule that
    holds fewest of them is tried.

    Args:
        num_devices: D x K x T.
        batch_size: Examples of a mini-batch, over all replicas.
        max_stages: The most stages that the model allows.
        max_shards: T divides it.
        names: The schedules to try.
        remats: The values of `remat` to try.
        microbatches: The values of M to try. None for all powers of two.
    """
    # The model bounds T and K, so their number does not grow with the devices.
    for T in _divisors(math.gcd(num_devices, max_shards), max_shards):
        for K in _divisors(num_devices // T, max_stages):
            D = num_devices // T // K
            if batch_size % D:
                continue
            examples = batch_size // D
            Ms = microbatches or [2**i for i in range(examples.bit_length())]
            for M in (M for M in Ms if examples % M == 0):
                kinds = itertools.product(_schedules(K, M, max_stages, names), remats)
                for (name, v), remat in kinds:
                    yield ParallelConfig(
                        num_replicas=D,
                        num_devices=K,
                        num_shards=T,
                        num_microbatches=M,
                        schedule=name,
                        remat=remat_lib.find(remat),
                        stages_per_device=v,
                    )


def _schedules(
    num_devices: int,
    num_microbatches: int,
    max_stages: int,
    names: Sequence[schedules.Name],
) -> Iterator[tuple[schedules.Name, int]]:
    """Yields the schedules that so many microbatches can run, with their v."""
    K, M = num_devices, num_microbatches
    if K == 1:
        yield min(names, key=_held_by_one_device), 1
        return
    for name in names:
        policy = schedules.find(name)
        assert isinstance(policy, schedules.SchedulePolicy)
        if policy.min_microbatches(K) <= M:
            for v in policy.stages_per_device:
                if v == 1 or (v * K <= max_stages and M % K == 0):
                    yield name, v


def _held_by_one_device(name: schedules.Name) -> tuple[int, ...]:
    """Returns microbatches in flight on one device, and 1 if backwards are split."""
    schedule = _make_schedule(name, 1, 2, 1)
    return *schedule.in_flight, int(schedule.splits_backwards)


def _divisors(n: int, largest: int) -> list[int]:
    return [d for d in range(1, min(n, largest) + 1) if n % d == 0]
