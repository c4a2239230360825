"""The data flow between stages, and schedules of stages that stand in no line."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpipe import schedules
from tfgpipe.schedules import Action, DataFlow, Schedule, draw

pytestmark = pytest.mark.pure

# Two encoders of two stages each, and a head.
TOWERS = DataFlow(((), (0,), (), (2,), (1, 3)))


@st.composite
def flows(draw, most=7):
    """Any data flow of a few stages, connected or not."""
    K = draw(st.integers(1, most))
    return DataFlow(
        tuple(
            tuple(draw(st.sets(st.integers(0, k - 1), max_size=3))) if k else ()
            for k in range(K)
        )
    )


def test_a_line_is_the_data_flow_by_default():
    plan = schedules.gpipe(3, 2)
    assert plan.flow is None
    assert plan.data_flow == DataFlow.line(3) == DataFlow(((), (0,), (1,)))
    assert plan.data_flow.targets == ((1,), (2,), ())
    assert plan.data_flow.heights == (3, 2, 1)
    assert schedules.gpipe(3, 2, flow=DataFlow.line(3)) == plan
    assert plan.with_flow(DataFlow.line(3)) is plan


def test_stages_are_read_in_order_and_once():
    assert DataFlow(((), (), (1, 0, 1))).sources[2] == (0, 1)
    assert TOWERS.targets == ((1,), (4,), (3,), (4,), ())
    assert TOWERS.heights == (3, 2, 3, 2, 1)
    assert TOWERS.depth == 3


@pytest.mark.parametrize("sources", [((0,),), ((), (1,)), ((1,), ()), ((), (-1,))])
def test_a_stage_that_reads_from_no_earlier_one_is_refused(sources):
    with pytest.raises(ValueError, match="A stage reads outputs of stages before it"):
        DataFlow(sources)


def test_an_encoder_waits_for_no_other():
    plan = schedules.gpipe(5, 2, flow=TOWERS)
    assert plan.dependencies(Action("forward", 2, 0)) == ()
    assert plan.dependencies(Action("forward", 4, 1)) == (
        Action("forward", 1, 1),
        Action("forward", 3, 1),
    )
    assert plan.dependencies(Action("backward", 1, 0)) == (
        Action("forward", 1, 0),
        Action("backward", 4, 0),
    )
    assert plan.receivers(Action("backward", 4, 0)) == (1, 3)
    assert plan.receivers(Action("backward", 2, 0)) == ()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_two_encoders_begin_and_end_together(name):
    """Each encoder with the head is the line of its depth."""
    plan = schedules.find(name)(5, 6, flow=TOWERS)
    rows = draw(plan).splitlines()
    line = draw(schedules.make(name, num_stages=3, num_microbatches=6)).splitlines()
    cells = [row.partition("  ")[2] for row in rows]
    expected = [row.partition("  ")[2] for row in line]
    assert cells == [expected[k] for k in (0, 1, 0, 1, 2)]
    assert plan.in_flight == tuple(
        schedules.make(name, num_stages=3, num_microbatches=6).in_flight[k]
        for k in (0, 1, 0, 1, 2)
    )


@given(flows(), st.sampled_from(schedules.NAMES), st.integers(0, 5))
def test_every_data_flow_has_each_named_schedule(flow, name, more):
    K = flow.num_stages
    policy = schedules.find(name)
    plan = policy(K, policy.min_microbatches(K) + more, flow=flow)
    assert plan.validate() is plan
    slots = plan.slots
    for action, slot in slots.items():
        assert all(slots[needed] < slot for needed in plan.dependencies(action))


@given(flows(), st.integers(2, 3), st.integers(0, 5))
def test_every_data_flow_has_an_interleaved_schedule(flow, v, more):
    sources = [tuple(flow.sources)] * v  # As many again, of the same shape.
    K = flow.num_stages
    shifted = tuple(
        tuple(i * K + k for k in some) or ((i * K - 1,) if i else ())
        for i, each in enumerate(sources)
        for some in each
    )
    plan = schedules.interleaved(v * K, K + more, num_devices=K, flow=DataFlow(shifted))
    assert plan.validate() is plan


@given(flows(), st.sampled_from(schedules.NAMES))
def test_the_schedule_of_a_line_runs_on_every_data_flow(flow, name):
    K = flow.num_stages
    M = schedules.find(name).min_microbatches(K)
    line = schedules.make(name, num_stages=K, num_microbatches=M)
    plan = line.with_flow(flow)
    assert plan.orders == line.orders
    assert plan.data_flow == flow


def test_fewer_microbatches_than_devices_are_enough_for_a_shallow_model():
    assert schedules.one_f_one_b(5, 3, flow=TOWERS).validate()
    with pytest.raises(ValueError, match=r"one after the other\. Received.*=2 for 3"):
        schedules.one_f_one_b(5, 2, flow=TOWERS)


def test_an_order_that_the_data_flow_does_not_allow_is_refused():
    flow = DataFlow(((), ()))
    F, B = "forward", "backward"
    order = (Action(F, 1, 0), Action(B, 1, 0), Action(F, 0, 0), Action(B, 0, 0))
    plan = Schedule(2, 1, (order,), flow=flow).validate()
    with pytest.raises(ValueError, match="forward of stage 1, microbatch 0, waits"):
        plan.with_flow(DataFlow.line(2))
    with pytest.raises(ValueError, match=r"Received one of 2 stages for 3\."):
        dataclasses.replace(schedules.gpipe(3, 2), flow=flow).validate()


def test_a_placement_and_fewer_microbatches_keep_the_data_flow():
    plan = schedules.gpipe.on((0, 1, 0, 1, 0), 4, TOWERS)
    assert plan.placement == (0, 1, 0, 1, 0)
    assert plan.first_microbatches(2).flow == plan.flow == TOWERS
