"""What a search found, as a value that prints as people read it."""

from __future__ import annotations

import dataclasses

from tfgpipe._util import readable_count, text_table
from tfgpipe.planner.devices import GIB, Device
from tfgpipe.planner.layout import Layout
from tfgpipe.planner.question import Prediction, Question

HEADER = (
    *("D", "K", "T", "M", "schedule", "remat"),
    *("step ms", "MFU", "bubble", "GiB a device", "most of it"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loser:
    """A class of layouts of which none is among the best.

    Attributes:
        name: Such as `"T=8"`.
        layout: The best of them; or the leanest, if none fits; None if there is none.
        why: What is wrong with it.
    """

    name: str
    layout: Layout | None
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plans:
    """What a search found. `print` it for a table.

    Attributes:
        question: What was asked.
        best: The fastest that fit, the first first; empty if nothing fits.
        losers: Why the others are not among them.
        closest: Of those that do not fit, what needs least; None if all fit.
        num_layouts: How many were looked at.
        num_fitting: How many of them fit.
    """

    question: Question
    best: tuple[Prediction, ...]
    losers: tuple[Loser, ...]
    closest: Prediction | None
    num_layouts: int
    num_fitting: int

    @property
    def missing_bytes(self) -> float:
        """By how much nothing fits: bytes that a device lacks, 0 if something fits."""
        if self.best or self.closest is None:
            return 0.0
        return self.closest.fullest.total - self.question.device.memory

    def __str__(self) -> str:
        return _text(self)


def too_large(found: Prediction, device: Device) -> str:
    """Says what a prediction needs that the device does not have."""
    held = found.fullest
    parts = sorted(held.parts.items(), key=lambda part: -part[1])[:2]
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    return (
        f"needs {held.total / GIB:.1f} GiB of {device.memory / GIB:.0f}, at the least: "
        f"{named}"
    )


def _text(plans: Plans) -> str:
    """Returns plans as people read them."""
    question = plans.question
    lines = [_asked(question)]
    if not plans.best:
        return "\n".join([*lines, _nothing_fits(plans)])
    lines.append(
        text_table(
            HEADER,
            [_row(each) for each in plans.best],
            left=("schedule", "remat", "most of it"),
        )
    )
    lines.append(
        f"{plans.num_fitting:,} of {plans.num_layouts:,} layouts fit into "
        f"{question.device.memory / GIB:.0f} GiB."
    )
    if plans.losers:
        width = max(len(loser.name) for loser in plans.losers)
        lines += [
            "Why others lose, each with its best layout:",
            *(
                f"  {loser.name:{width}}  {loser.why}"
                + (f" ({loser.layout})" if loser.layout else "")
                for loser in plans.losers
            ),
        ]
    return "\n".join(lines)


def _nothing_fits(plans: Plans) -> str:
    """Returns by how much nothing fits, and what would need least."""
    closest = plans.closest
    if closest is None:
        return ""
    return (
        f"Nothing fits: the leanest of {plans.num_layouts:,} layouts lacks "
        f"{plans.missing_bytes / GIB:.1f} GiB on its fullest device. {closest.layout} "
        f"{too_large(closest, plans.question.device)}. Try more devices, a smaller "
        "batch, or half precision."
    )


def parts(prediction: Prediction) -> str:
    """Returns a table of what each device of a pipeline holds, in GiB."""
    names = list(prediction.fullest.parts)
    return text_table(
        ("device", *names, "total"),
        [
            (
                str(p),
                *(f"{size / GIB:.2f}" for size in held.parts.values()),
                f"{held.total / GIB:.2f}",
            )
            for p, held in enumerate(prediction.memory)
        ],
        left=(),
    )


def _asked(question: Question) -> str:
    workload, device = question.workload, question.device
    return (
        f"{workload.name} on {question.num_devices} x {device.name}: "
        f"{readable_count(workload.parameters)} parameters, "
        f"{readable_count(workload.flops * question.batch_size)}FLOP a step of "
        f"{question.batch_size} rows in {workload.dtype}"
    )


def _row(prediction: Prediction) -> tuple[str, ...]:
    layout, time, held = prediction.layout, prediction.time, prediction.fullest
    return (
        str(layout.num_replicas),
        str(layout.num_devices),
        str(layout.num_shards),
        str(layout.num_microbatches),
        layout.order,
        layout.remat,
        f"{1e3 * time.total:,.1f}",
        f"{100 * prediction.mfu:.1f}%",
        f"{100 * time.bubble:.1f}%",
        f"{held.total / GIB:.1f}",
        held.largest,
    )
