"""The result of a search: a value that prints as a table."""

from __future__ import annotations

import dataclasses

from tfgpipe._util import readable_count, text_table
from tfgpipe.planner.devices import GIB, Device
from tfgpipe.planner.parallel_config import ParallelConfig
from tfgpipe.planner.plan_request import Estimate, PlanRequest

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
        reason: What is wrong with it.
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
        rejected: Why the others are not among them.
        closest: Of those that do not fit, the one that needs least; None if all fit.
        num_configs: How many there are.
        num_fitting: How many of them fit.
    """

    request: PlanRequest
    best: tuple[Estimate, ...]
    rejected: tuple[Rejected, ...]
    closest: Estimate | None
    num_configs: int
    num_fitting: int

    @property
    def missing_bytes(self) -> float:
        """By how much nothing fits: bytes that a device lacks, 0 if something fits."""
        if self.best or self.closest is None:
            return 0.0
        return self.closest.fullest.total - self.request.device.memory

    def __str__(self) -> str:
        request = self.request
        workload, device = request.workload, request.device
        lines = [
            f"{workload.name} on {request.num_devices} x {device.name}: "
            f"{readable_count(workload.parameters)} parameters, "
            f"{readable_count(workload.flops * request.batch_size)}FLOP a step of "
            f"{request.batch_size} rows in {workload.dtype}"
        ]
        if not self.best and self.closest is not None:
            lines.append(
                f"Nothing fits: the leanest of {self.num_configs:,} configurations "
                f"lacks {self.missing_bytes / GIB:.1f} GiB on its fullest device. "
                f"{self.closest.config} {too_large(self.closest, device)}. Try more "
                "devices, a smaller batch, or half precision."
            )
        if not self.best:
            return "\n".join(lines)
        rows = [_row(each) for each in self.best]
        width = max((len(each.name) for each in self.rejected), default=0)
        lines += [
            text_table(HEADER, rows, left=("schedule", "remat", "most of it")),
            f"{self.num_fitting:,} of {self.num_configs:,} configurations fit into "
            f"{device.memory / GIB:.0f} GiB.",
            *(["Why others lose, each with its best configuration:"] if width else []),
            *(
                f"  {each.name:{width}}  {each.reason}"
                + (f" ({each.config})" if each.config else "")
                for each in self.rejected
            ),
        ]
        return "\n".join(lines)


def too_large(found: Estimate, device: Device) -> str:
    """Says what an estimate needs that the device does not have."""
    held = found.fullest
    parts = sorted(held.parts.items(), key=lambda part: -part[1])[:2]
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    return (
        f"needs {held.total / GIB:.1f} GiB of {device.memory / GIB:.0f}, at the least: "
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
        str(config.num_shards),
        str(config.num_microbatches),
        config.order,
        config.remat,
        f"{1e3 * time.total:,.1f}",
        f"{100 * estimate.mfu:.1f}%",
        f"{100 * time.bubble:.1f}%",
        f"{held.total / GIB:.1f}",
        held.largest,
    )
