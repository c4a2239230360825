"""A timeline worked out by hand."""

from __future__ import annotations

from tfgpipe import schedules
from tfgpipe.simulation.timeline import Span, Timeline, TransferSpan

# Two devices, one microbatch, with recomputation, on a clock that starts at 10:
#
#     10  11  12  13  14  15  16  17  18  19
#     F0  ..  ..  ..  ..  ..  r0  B0  B0        works 4 of 9
#     ..  F0  r0  B0  B0  B0  ..  ..  ..        works 5 of 9
BY_HAND = Timeline(
    schedules.gpipe(2, 1),
    (
        Span("forward", 0, 0, 0, 10.0, 11.0),
        Span("forward", 1, 0, 1, 11.0, 12.0),
        Span("recompute", 1, 0, 1, 12.0, 13.0),
        Span("backward", 1, 0, 1, 13.0, 16.0),
        Span("recompute", 0, 0, 0, 16.0, 17.0),
        Span("backward", 0, 0, 0, 17.0, 19.0),
    ),
    (TransferSpan(0, 1, 0, 10.75, 11.0), TransferSpan(1, 0, 0, 15.5, 16.0)),
    "by hand",
)
