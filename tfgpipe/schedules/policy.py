"""Schedule policies: a schedule for each number of stages and microbatches."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tfgpipe._util import Choice, argument_checks
from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.kinds import ActionKind
from tfgpipe.schedules.schedule import Action, Schedule

Orders = tuple[tuple[Action, ...], ...]


@dataclasses.dataclass(frozen=True)
class SchedulePolicy(Choice, abc.ABC):
    """Orders the actions of any number of stages, microbatches and devices.

    A policy of one's own is a frozen dataclass in one file, and an argument `schedule`:

    >>> import dataclasses
    >>> from tfgpipe.schedules import Action, SchedulePolicy, draw
    >>> @dataclasses.dataclass(frozen=True)
    ... class OneByOne(SchedulePolicy):
    ...     name = "one_by_one"
    ...     def orders(self, flow, num_microbatches, num_devices):
    ...         return tuple(
    ...             tuple(
    ...                 Action(kind, k, m)
    ...                 for m in range(num_microbatches)
    ...                 for kind in ("forward", "backward")
    ...             )
    ...             for k in range(num_devices)
    ...         )
    >>> print(draw(OneByOne()(2, 2)))
    stage 0  F0 .. .. B0 F1 .. .. B1
    stage 1  .. F0 B0 .. .. F1 B1 ..

    To be saved with a model, it is registered with
    `keras.saving.register_keras_serializable`.

    Attributes:
        name: Name in tables and saved models. Of the class.
        shares_devices: True if a device may have several stages. An attribute of the
            class.
        stages_per_device: Numbers of stages on a device that a search tries. Of the
            class.
        splits_backwards: True if backwards may run in two halves. An attribute of the
            class.
        has_copies: True if microbatches are copied to the host and back. Of the class.
        is_periodic: True if more microbatches go on as those before, group by group of
            as many as there are devices. Of the class.
    """

    shares_devices: ClassVar[bool] = False
    stages_per_device: ClassVar[tuple[int, ...]] = (1,)
    splits_backwards: ClassVar[bool] = False
    has_copies: ClassVar[bool] = False
    is_periodic: ClassVar[bool] = True

    @abc.abstractmethod
    def orders(self, flow: DataFlow, num_microbatches: int, num_devices: int) -> Orders:
        """Returns for each device its actions in order.

        Args:
            flow: The data flow between the K stages.
            num_microbatches: M, at least `min_microbatches`.
            num_devices: P, which divides K. Stage k is on the device that `deal` says.
        """

    def min_microbatches(self, depth: int) -> int:
        """Returns the fewest microbatches that fill stages which follow one another.

        Args:
            depth: The number of devices on the longest way through the model.
        """
        return depth

    def __call__(
        self,
        num_stages: int,
        num_microbatches: int,
        *,
        num_devices: int | None = None,
        flow: DataFlow | None = None,
    ) -> Schedule:
        """Returns the schedule of so many stages and microbatches.

        Args:
            num_stages: K.
            num_microbatches: M.
            num_devices: P, which divides K. Stage k is on the device that `deal` says.
                Defaults to K.
            flow: The data flow between the stages. Defaults to a line.

        Raises:
            ValueError: If there is no such schedule.
        """
        K, M = num_stages, num_microbatches
        argument_checks.check_schedule_size(K, M)
        P = K
        if num_devices is not None:
            P = argument_checks.check_count("num_devices", num_devices)
        _check_devices(self, K, P)
        flow = flow or DataFlow.line(K)
        least = self.min_microbatches(min(flow.depth, P))
        if least > M:
            raise ValueError(
                f"Schedule '{self.name}' needs at least as many microbatches as there "
                f"are devices{' one after the other' if flow.depth < P else ''}. "
                f"Received num_microbatches={M} for {least} devices. Use "
                f'num_microbatches={least} or more, or schedule="gpipe", which takes '
                "any number."
            )
        return Schedule(K, M, self.orders(flow, M, P), self.name, flow)

    def on(
        self,
        placement: Sequence[int],
        num_microbatches: int,
        flow: DataFlow | None = None,
    ) -> Schedule:
        """Returns the schedule with stage k on device `placement[k]`.

        Args:
            placement: For each stage, the index of its device.
            num_microbatches: M.
            flow: The data flow between the stages. Defaults to a line.

        Raises:
            ValueError: If there is no such schedule.
        """
        P = max(placement, default=0) + 1
        schedule = self(len(placement), num_microbatches, num_devices=P, flow=flow)
        return schedule.on(placement, num_microbatches, flow)

    def fitted(
        self, costs: Callable[[], Any], memory_limit: argument_checks.MemoryLimit
    ) -> SchedulePolicy:
        """Returns the policy for the stages that there are; itself if none is better.

        Args:
            costs: Returns the `tfgpipe.Costs` of the stages, which takes a while.
            memory_limit: Bytes of a device, or of each, or None.
        """
        del costs, memory_limit
        return self

    @property
    def deals_stages(self) -> bool:
        """True if each device has several stages, dealt to `devices`."""
        return min(self.stages_per_device) > 1

    def check_num_stages(self, num_stages: int | None) -> int | None:
        """Returns K; raises ValueError if it is None and has no default."""
        if num_stages is None and self.deals_stages:
            raise ValueError(
                f'schedule="{self.name}" places several stages on each device. '
                "Received no `num_stages`. Pass a multiple of the number of devices."
            )
        return num_stages

    def choose_num_devices(self, num_stages: int, available: int) -> int:
        """Returns P, the number of devices for K stages, of those available."""
        v = min(self.stages_per_device)
        if v == 1:
            return num_stages
        most = min(available, num_stages // v)
        return max((p for p in range(1, most + 1) if num_stages % p == 0), default=1)

    def deal(self, num_stages: int, num_devices: int) -> tuple[int, ...]:
        """Returns the index of each stage's device, dealt round robin."""
        return tuple(k % num_devices for k in range(num_stages))

    def in_flight(
        self, num_stages: int, num_microbatches: int, num_devices: int
    ) -> tuple[int, ...]:
        """Returns `Schedule.in_flight` of the schedule on a line of stages."""
        # After as many groups of P microbatches as there are in flight, all repeats.
        M = min(num_microbatches, 4 * num_devices)
        return self(num_stages, M, num_devices=num_devices).in_flight


def _check_devices(policy: SchedulePolicy, num_stages: int, num_devices: int) -> None:
    """Raises ValueError if the stages cannot be dealt to the devices."""
    if num_stages != num_devices and not policy.shares_devices:
        raise ValueError(
            f"Schedule '{policy.name}' has one stage a device. Received {num_stages} "
            f'stages for {num_devices} devices. Use schedule="interleaved", which '
            "places several on each."
        )
    if num_stages % num_devices:
        raise ValueError(
            "Stages are dealt to devices, as many to each. Received "
            f"{num_stages} stages for {num_devices} devices. Make `num_stages` a "
            "multiple of the devices, or name fewer `devices`."
        )


def passes(kind: ActionKind, stages: Sequence[int], M: int) -> list[Action]:
    """Returns the actions of a kind, microbatch after microbatch of each stage."""
    return [Action(kind, k, m) for k in stages for m in range(M)]


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], *, num_warmup: int
) -> tuple[Action, ...]:
    """Returns forwards with a backward after each from `num_warmup` forwards on."""
    order = list(forwards[: num_warmup - 1])
    for forward, backward in zip(forwards[num_warmup - 1 :], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[max(len(forwards) - num_warmup + 1, 0) :])
