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
from tfgpipe._util import argument_checks
from tfgpipe.costs import StepLoad
from tfgpipe.partition import StepConfig
from tfgpipe.planner import shard_axes
from tfgpipe.planner.shard_axes import POSITIONS, UNITS, ShardAxis
from tfgpipe.remat import RematLike
from tfgpipe.schedules import Schedule, SchedulePolicy

# The policies that a search tries.
REMATS: tuple[remat_lib.Name, ...] = ("none", "auto", "stage", "layer")
# By `shard_replicas` the state that replicas share out.
_SHARED = {"none": (), "slots": ("slots",), "weights": ("slots", "weights")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(StepConfig):
    """Replicas x stages x shards, and the choices of a pipeline's steps.

    Attributes:
        num_stages: Stages of a pipeline, all of each device. Not an argument.
        num_microbatches: M.
        schedule: The order of actions, or its name.
        remat: The rematerialisation policy, or its name.
        num_replicas: D.
        num_devices: K, the devices of a pipeline, in a row.
        num_shards: T.
        shard_axis: The axis along which T devices share layers, or its name: `"units"`
            or `"positions"` of a sequence.
        stages_per_device: v; above 1 for `"interleaved"` alone.
        recompute_when: Start of recomputation, as in `tfgpipe.Costs`. This library
            recomputes when asked.
        sum_when: Start of the sums of gradients over replicas: `"last"`, after the
            pipeline, as in this library; or `"early"`, layer by layer amid the
            backwards of the last microbatch, as in others, so that a step waits for
            what takes longer than these.
        shard_replicas: State that replicas share out, as of `tfgpipe.PipelineStrategy`:
            `"slots"` of the optimizer, so that each updates 1 / D of the weights; or
            `"weights"` as well, of which each has a slice, and gathers those of a stage
            for its passes.
    """

    num_stages: int = dataclasses.field(init=False)
    num_replicas: int
    num_devices: int
    num_shards: int
    shard_axis: ShardAxis = UNITS
    stages_per_device: int = 1
    recompute_when: Literal["asked", "early"] = "asked"
    sum_when: Literal["last", "early"] = "last"
    shard_replicas: Literal["none", "slots", "weights"] = "none"

    def __post_init__(self) -> None:
        num_stages = self.num_devices * self.stages_per_device
        if isinstance(self.schedule, Schedule):
            num_stages = self.schedule.num_stages
        object.__setattr__(self, "num_stages", num_stages)
        argument_checks.check_choice("sum_when", self.sum_when, ("last", "early"))
        object.__setattr__(self, "shard_axis", shard_axes.find(self.shard_axis))
        super().__post_init__()

    @property
    def order(self) -> str:
        """The schedule, with the number of stages a device if that is not 1.

        Behind it what replicas share out.
        """
        v, name = self.stages_per_device, self.schedule.name
        order = name if v == 1 else f"{name} x {v}"
        shares = self.shard_replicas
        return f"{order}, {shares} / {self.num_replicas}" if _SHARED[shares] else order

    @property
    def shards(self) -> str:
        """T, and what of it if that is not units."""
        T, axis = self.num_shards, self.shard_axis
        return f"{T}" if T == 1 or axis == UNITS else f"{T} {axis.name}"

    @property
    def slot_share(self) -> float:
        """The share of slots and updates that a replica has."""
        return self._share("slots")

    @property
    def weight_share(self) -> float:
        """The share of weights that a replica has between passes."""
        return self._share("weights")

    def _share(self, what: str) -> float:
        return 1 / self.num_replicas if what in _SHARED[self.shard_replicas] else 1.0

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
        holds goes on as it grew. An order that is searched for holds no more.
        """
        M, P = self.num_microbatches, self.num_devices
        if isinstance(self.schedule, Schedule) or M <= 4 * P:
            return StepLoad.of(self.make_schedule(), self.remat)
        more = StepLoad.of(self.make_schedule(4 * P), self.remat)
        if not self.schedule.is_periodic:
            return more.repeated(M)
        return more.continued(StepLoad.of(self.make_schedule(3 * P), self.remat), M)

    def stages_on(self, p: int) -> Sequence[int]:
        """Returns the stages on device p."""
        return [k for k, q in enumerate(self.load.placement) if q == p]

    def __str__(self) -> str:
        return (
            f"D={self.num_replicas} K={self.num_devices} T={self.shards} "
            f"M={self.num_microbatches} {self.order} remat={self.remat}"
        )


@functools.lru_cache(maxsize=16)
def _make_schedule(
    policy: SchedulePolicy, num_stages: int, num_microbatches: int, num_devices: int
) -> Schedule:
    return policy(num_stages, num_microbatches, num_devices=num_devices)


def enumerate_configs(
    *,
    num_devices: int,
    batch_size: int,
    max_stages: int,
    max_shards: int,
    max_parts: int = 1,
    names: Sequence[schedules.Name | SchedulePolicy | Schedule] = schedules.NAMES,
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
        max_shards: T divides it, of units.
        max_parts: T divides it, of positions.
        names: The schedules to try.
        remats: The values of `remat` to try.
        microbatches: The values of M to try. None for all powers of two.
    """
    policies = [*map(_find_policy, names)]
    # The model bounds T and K, so their number does not grow with the devices.
    ways = [
        (axis, T)
        for axis, most in ((UNITS, max_shards), (POSITIONS, max_parts))
        for T in _divisors(math.gcd(num_devices, most), most)
        if T > 1 or axis == UNITS
    ]
    for axis, T in ways:
        for K in _divisors(num_devices // T, max_stages):
            D = num_devices // T // K
            if batch_size % D:
                continue
            examples = batch_size // D
            Ms = microbatches or [2**i for i in range(examples.bit_length())]
            for M in (M for M in Ms if examples % M == 0):
                kinds = itertools.product(
                    _schedules(K, M, max_stages, policies), remats
                )
                for (policy, v), remat in kinds:
                    yield ParallelConfig(
                        num_replicas=D,
                        num_devices=K,
                        num_shards=T,
                        shard_axis=axis,
                        num_microbatches=M,
                        schedule=policy,
                        remat=remat_lib.find(remat),
                        stages_per_device=v,
                    )


def _schedules(
    num_devices: int,
    num_microbatches: int,
    max_stages: int,
    policies: Sequence[SchedulePolicy],
) -> Iterator[tuple[SchedulePolicy, int]]:
    """Yields the schedules that so many microbatches can run, with their v."""
    K, M = num_devices, num_microbatches
    if K == 1:
        yield min(policies, key=_held_by_one_device), 1
        return
    for policy in policies:
        if policy.min_microbatches(K) <= M:
            for v in policy.stages_per_device:
                if v == 1 or (v * K <= max_stages and M % K == 0):
                    yield policy, v


def _find_policy(name: schedules.Name | SchedulePolicy | Schedule) -> SchedulePolicy:
    policy = schedules.find(name)
    assert isinstance(policy, SchedulePolicy)
    return policy


def _held_by_one_device(policy: SchedulePolicy) -> tuple[int, ...]:
    """Returns microbatches in flight on one device, and 1 if backwards are split."""
    schedule = _make_schedule(policy, 1, 2, 1)
    return *schedule.in_flight, int(schedule.splits_backwards)


def _divisors(n: int, largest: int) -> list[int]:
    return [d for d in range(1, min(n, largest) + 1) if n % d == 0]
