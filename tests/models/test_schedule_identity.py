"""Schedules that the pairs of `test_identity` leave out, against the plain model."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from tests.helpers.identity import assert_same_step
from tests.helpers.identity_models import STACKS, masked
from tests.helpers.marks import nightly
from tests.helpers.some_schedules import order
from tfgpipe import schedules
from tfgpipe.schedules.schedule import Schedule


@pytest.mark.parametrize(
    ("schedule", "rows", "remat"), [("1f1b", 9, "stage"), ("zero_bubble", 3, "none")]
)
def test_lengths_unknown_until_run_time(schedule, rows, remat):
    """Sequences of any length, the shapes of what crosses stages open as well."""
    stack = dataclasses.replace(
        STACKS["masked"], make=functools.partial(masked, length=None)
    )
    assert_same_step(
        stack,
        rows,
        unknown=True,
        num_stages=3,
        num_microbatches=4,
        schedule=schedule,
        remat=remat,
    )


def test_three_interleaved_stages_on_each_device():
    arguments = {"num_stages": 6, "num_microbatches": 4, "schedule": "interleaved"}
    assert_same_step(STACKS["dropped"], 9, devices=["CPU:0", "CPU:1"], **arguments)


@pytest.mark.parametrize("schedule", schedules.NAMES[4:])
def test_schedules_of_other_papers(schedule):
    """Five microbatches, of which some have one example more."""
    shared = schedules.find(schedule).deals_stages
    devices = ["CPU:0", "CPU:1"] if shared else None
    arguments = {"num_stages": 4, "num_microbatches": 5, "remat": "stage"}
    assert_same_step(
        STACKS["dense"], 11, devices=devices, schedule=schedule, **arguments
    )


@pytest.mark.parametrize(
    ("schedule", "remat"), [("1f1b", "except_last"), ("zero_bubble", "stage")]
)
def test_programs_compiled_by_xla(schedule, remat):
    arguments = {"num_stages": 2, "num_microbatches": 2, "jit_compile": True}
    assert_same_step(
        STACKS["regularised"], 8, schedule=schedule, remat=remat, **arguments
    )


# Half precision has a thousandth; sums over rows in it lose a few of these.
HALF = (1e-2, 4e-3)


@pytest.mark.usefixtures("mixed_precision")
@pytest.mark.parametrize(
    ("schedule", "stack"),
    nightly(
        ((name, "dense") for name in schedules.NAMES),
        gate=[("1f1b", "masked"), ("gpipe", "dense"), ("zero_bubble", "dense")],
    ),
)
def test_mixed_precision_scales_the_loss(schedule, stack):
    """Both models get Keras' own loss scaling, which is to be undone exactly."""
    arguments = {"num_stages": 4, "num_microbatches": 4, "schedule": schedule}
    shared = schedules.find(schedule).deals_stages
    devices = ["CPU:0", "CPU:1"] if shared else None
    assert_same_step(STACKS[stack], 6, devices=devices, tolerance=HALF, **arguments)


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [("gpipe", "stage"), ("1f1b", "none"), ("zero_bubble", "stage")],
)
def test_two_encoders_side_by_side(schedule, remat):
    """Two stages of each encoder, and those of one wait for none of the other."""
    arguments = {"balance": [1, 1, 1, 1, 2], "num_microbatches": 5, "remat": remat}
    assert_same_step(STACKS["two_encoders"], 9, schedule=schedule, **arguments)


# -- schedules of one's own -----------------------------------------------------------


OWN = {
    "backwards in any order": Schedule(
        2,
        3,
        (
            order("0F0 0F1 0F2 0B1 0B2 0B0"),
            order("1F0 1F1 1B1 1F2 1B2 1B0"),
        ),
    ),
    "a backward in halves on some stages and microbatches": Schedule(
        3,
        3,
        (
            order("0F0 0F1 0F2 0B1 0b0 0B2 0w0"),
            order("1F0 1F1 1F2 1b1 1b0 1b2 1w2 1w0 1w1"),
            order("2F0 2F1 2B1 2B0 2F2 2B2"),
        ),
    ),
    "stages there and back": Schedule(
        4,
        2,
        (
            order("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1"),
            order("1F0 2F0 1F1 2F1 2b0 1b0 2b1 1b1 2w0 2w1 1w0 1w1"),
        ),
    ),
}


@pytest.mark.parametrize(
    ("name", "remat"),
    list(zip(OWN, ["layer", "except_last", "layer"], strict=True)),
)
def test_a_schedule_of_ones_own(name, remat):
    plan = OWN[name]
    assert_same_step(
        STACKS["skipping"],
        7,
        num_microbatches=plan.num_microbatches,
        schedule=plan,
        remat=remat,
    )


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_stages_dealt_in_another_way(name):
    """The same order of actions on devices that hold other stages."""
    plan = schedules.make(name, num_stages=4, num_microbatches=4, num_devices=2)
    arguments = {"num_microbatches": 4, "schedule": plan.with_placement((0, 0, 1, 1))}
    assert_same_step(STACKS["tied"], 9, **arguments)
