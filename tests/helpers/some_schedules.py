"""Schedules: any of the named ones, and some written by hand."""

from __future__ import annotations

from hypothesis import strategies as st

from tfgpipe import schedules
from tfgpipe.schedules.schedule import Action, Schedule

FOLDED = ("zbv", "v_half", "v_min", "dualpipe_v")
# Those of several stages on a device.
SHARED = ("gpipe", "interleaved", "looped_bfs", "interleaved_zb")


@st.composite
def plans(draw, names=schedules.NAMES, most=8):
    """Any named schedule: of 1 to 8 devices, with whatever M and v it takes."""
    name = draw(st.sampled_from(names))
    P = draw(st.integers(1, most))
    most_each = 3 if name in SHARED else 2 if name in FOLDED else 1
    v = draw(st.integers(1, most_each))
    fewest = schedules.find(name).min_microbatches(P)
    M = draw(st.integers(fewest, fewest + 17))
    return schedules.make(name, num_stages=v * P, num_microbatches=M, num_devices=P)


def order(actions: str) -> tuple[Action, ...]:
    """Reads actions such as `"0F1 1B0 1b2 1w2"`: stage, kind, microbatch."""
    kinds = {
        "F": "forward",
        "B": "backward",
        "b": "backward_input",
        "w": "backward_weight",
    }
    return tuple(Action(kinds[a[1]], int(a[0]), int(a[2])) for a in actions.split())


LAST_FIRST = Schedule(
    2,
    2,
    (order("0F0 0F1 0B1 0B0"), order("1F0 1F1 1B1 1B0")),
    name="last first",
)
