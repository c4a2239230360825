"""A model, a kind of device and how many: what one layout would take and hold there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypedDict

from tfgpipe.partition import best_cut
from tfgpipe.planner import memory, step_time
from tfgpipe.planner.devices import Device
from tfgpipe.planner.layout import Layout
from tfgpipe.planner.memory import Memory
from tfgpipe.planner.step_time import StepTime
from tfgpipe.planner.workload import Layer, Workload

Cost: TypeAlias = Callable[[Layout, Layer], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a layout takes and holds.

    Attributes:
        layout: The layout.
        counts: The number of layers in each stage.
        time: What a step takes.
        memory: What each device of a pipeline holds.
        mfu: Model FLOPs utilisation: what a step has to do, recomputation aside, of
            what all devices could at their peak (Chowdhery et al. 2022, appendix B).
    """

    layout: Layout
    counts: tuple[int, ...]
    time: StepTime
    memory: tuple[Memory, ...]
    mfu: float

    @property
    def fullest(self) -> Memory:
        """The memory of the device that holds most."""
        return fullest(self.memory)


class _Given(TypedDict):
    """What time and memory depend on beside model, layout and cut."""

    rows: float
    num_slots: float
    device: Device


class Question:
    """What is asked: it predicts any layout.

    Args:
        workload: The model.
        device: What it is to run on.
        num_devices: How many of them.
        batch_size: Rows of a mini-batch, over all replicas.
        num_slots: Optimizer slots of a trained weight: 2 for Adam, 1 for momentum.

    Raises:
        ValueError: If a number is below 1, or the device has no peak for the type that
            the model computes in.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        device: Device,
        num_devices: int,
        batch_size: int,
        num_slots: float = 2,
    ) -> None:
        for name, value, least in (
            ("num_devices", num_devices, 1),
            ("batch_size", batch_size, 1),
            ("num_slots", num_slots, 0),
        ):
            if value < least:
                raise ValueError(
                    f"`{name}` is a number of at least {least}. Received "
                    f"{name}={value}."
                )
        device.peak(workload.dtype)
        self.workload = workload
        self.device = device
        self.num_devices = num_devices
        self.batch_size = batch_size
        self.num_slots = num_slots
        self._cuts: dict[tuple[object, ...], tuple[int, ...]] = {}

    def rows(self, layout: Layout) -> float:
        """Returns the rows of a microbatch."""
        return self.batch_size / layout.num_replicas / layout.num_microbatches

    def _given(self, layout: Layout) -> _Given:
        return {
            "rows": self.rows(layout),
            "num_slots": self.num_slots,
            "device": self.device,
        }

    def predict(
        self, layout: Layout, counts: Sequence[int] | None = None
    ) -> Prediction:
        """Returns what one layout takes and holds, whether it fits or not.

        Args:
            layout: The layout.
            counts: The number of layers in each stage. None for the best cut.
        """
        chosen = self.cut(layout) if counts is None else tuple(counts)
        time = step_time.step_time(
            self.workload,
            layout,
            chosen,
            **self._given(layout),
        )
        peak = self.device.peak(self.workload.dtype) * layout.total_devices
        return Prediction(
            layout=layout,
            counts=chosen,
            time=time,
            memory=self.memory(layout, chosen),
            mfu=self.workload.flops * self.batch_size / time.total / peak,
        )

    def least_seconds(self, layout: Layout, counts: Sequence[int]) -> float:
        """Returns what no step of a layout is faster than."""
        return step_time.least_seconds(
            self.workload,
            layout,
            counts,
            **self._given(layout),
        )

    def memory(self, layout: Layout, counts: Sequence[int]) -> tuple[Memory, ...]:
        """Returns what each device of a pipeline holds."""
        return memory.devices(
            self.workload,
            layout,
            counts,
            **self._given(layout),
        )

    def fits(self, held: Sequence[Memory]) -> bool:
        """Returns whether the fullest device has room."""
        return fullest(held).total <= self.device.memory

    def cut(self, layout: Layout) -> tuple[int, ...]:
        """Returns the number of layers in each stage.

        The slowest stage is as fast as can be; or if that does not fit, and it helps,
        the fullest is as empty as can be.
        """
        counts = self._best_cut(layout, self._seconds, "time")
        if self.fits(self.memory(layout, counts)):
            return counts
        lean = self._best_cut(layout, self._bytes, "bytes")
        held = [fullest(self.memory(layout, each)).total for each in (counts, lean)]
        return lean if held[1] < held[0] else counts

    def _best_cut(self, layout: Layout, cost: Cost, what: str) -> tuple[int, ...]:
        key = (
            what,
            layout.num_stages,
            layout.num_shards,
            layout.remat,
            self.rows(layout),
        )
        if key not in self._cuts:
            layers = self.workload.layers
            self._cuts[key] = best_cut(
                [cost(layout, layer) for layer in layers],
                num_stages=layout.num_stages,
                may_start=[layer.may_start for layer in layers],
            )
        return self._cuts[key]

    def _seconds(self, layout: Layout, layer: Layer) -> float:
        """Returns what a layer adds to its stage for a microbatch."""
        copies = dataclasses.replace(self.workload, layers=(layer,) * 3)
        one, two = step_time.stage_times(
            copies, layout, (1, 2), rows=self.rows(layout), device=self.device
        )
        return max(two.total - one.total, 0.0)

    def _bytes(self, layout: Layout, layer: Layer) -> float:
        """Returns what a layer adds to its device, a microbatch in flight."""
        T = layout.num_shards
        state = 4 * (2 + self.num_slots) * layer.parameters / layer.shards(T)
        return state + self.rows(layout) * layer.kept_bytes * layer.share(T)


def fullest(held: Sequence[Memory]) -> Memory:
    """Returns the memory of the device that holds most."""
    return max(held, key=lambda each: each.total)
