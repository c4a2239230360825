"""The order of actions, against the drawing, closed forms and its own dependencies."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpipe import schedule
from tfgpipe.schedule import Action, draw, gpipe


def test_the_drawing_in_the_docstring_is_the_schedule():
    drawn = re.findall(r"^    (stage \d  .*)$", schedule.__doc__, re.MULTILINE)
    assert "\n".join(drawn) == draw(gpipe(3, 4))


@pytest.mark.parametrize(
    ("num_microbatches", "num_stages", "drawn"),
    [
        (1, 1, ["stage 0  F0 B0"]),
        (
            1,
            3,
            [
                "stage 0  F0 .. .. .. .. B0",
                "stage 1  .. F0 .. .. B0 ..",
                "stage 2  .. .. F0 B0 .. ..",
            ],
        ),
        (3, 1, ["stage 0  F0 F1 F2 B2 B1 B0"]),
        (
            3,
            3,
            [
                "stage 0  F0 F1 F2 .. .. .. .. B2 B1 B0",
                "stage 1  .. F0 F1 F2 .. .. B2 B1 B0 ..",
                "stage 2  .. .. F0 F1 F2 B2 B1 B0 .. ..",
            ],
        ),
        (
            4,
            2,
            [
                "stage 0  F0 F1 F2 F3 .. .. B3 B2 B1 B0",
                "stage 1  .. F0 F1 F2 F3 B3 B2 B1 B0 ..",
            ],
        ),
    ],
)
def test_small_schedules_are_those_drawn_by_hand(num_microbatches, num_stages, drawn):
    assert draw(gpipe(num_stages, num_microbatches)).splitlines() == drawn


@given(st.integers(1, 9), st.integers(1, 40))
def test_every_action_runs_once_and_after_what_it_needs(num_stages, num_microbatches):
    plan = gpipe(num_stages, num_microbatches)
    slots = plan.slots()
    assert len(slots) == 2 * num_stages * num_microbatches
    for action, slot in slots.items():
        assert all(slots[needed] < slot for needed in plan.dependencies(action))


@given(st.integers(1, 9), st.integers(1, 40))
def test_the_bubble_is_that_of_the_paper(num_stages, num_microbatches):
    """K - 1 of M + K - 1 slots of each pass (Huang et al. 2019, section 2.3)."""
    slots = gpipe(num_stages, num_microbatches).slots()
    assert max(slots.values()) + 1 == 2 * (num_microbatches + num_stages - 1)


@given(st.integers(1, 6), st.integers(1, 12))
def test_a_device_runs_one_action_at_a_time(num_stages, num_microbatches):
    plan = gpipe(num_stages, num_microbatches)
    slots = plan.slots()
    for order in plan.orders:
        times = [slots[action] for action in order]
        assert times == sorted(set(times))


def test_actions_come_dependencies_first():
    actions = gpipe(3, 2).actions("backward")
    assert [(a.stage, a.microbatch) for a in actions] == [
        (2, 1),
        (1, 1),
        (2, 0),
        (0, 1),
        (1, 0),
        (0, 0),
    ]


def test_a_schedule_that_waits_for_itself_is_named():
    plan = gpipe(2, 1)
    first, second = plan.orders
    broken = dataclasses.replace(plan, orders=(first[::-1], second))
    with pytest.raises(ValueError, match="backward of stage 0, microbatch 0 waits"):
        broken.slots()


def test_an_action_is_written_as_in_the_paper():
    assert str(Action("forward", 1, 3)) == "F3"
    assert str(Action("backward", 0, 12)) == "B12"
