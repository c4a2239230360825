"""The order of actions as a value: what it may hold, how it is drawn and refused."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tfgpipe import schedules
from tfgpipe.schedules.schedule import Action, Schedule, draw

pytestmark = pytest.mark.pure


def actions(text):
    """Reads a device's actions, `F1.0` for the forward of stage 1 on microbatch 0."""
    kinds = {
        "F": "forward",
        "B": "backward",
        "I": "backward_input",
        "W": "backward_weight",
    }
    found = re.findall(r"([FBIW])(\d+)\.(\d+)", text)
    return tuple(Action(kinds[letter], int(k), int(m)) for letter, k, m in found)


def written(*orders, num_stages, num_microbatches):
    return Schedule(num_stages, num_microbatches, tuple(map(actions, orders)))


def test_what_an_action_needs_is_what_the_drawing_of_dependencies_shows():
    plan = schedules.gpipe(3, 2)
    forward, backward = Action("forward", 1, 1), Action("backward", 1, 1)
    assert plan.dependencies(forward) == (Action("forward", 0, 1),)
    assert plan.dependencies(backward) == (forward, Action("backward", 2, 1))
    assert plan.dependencies(Action("forward", 0, 1)) == ()
    last = Action("backward", 2, 1)
    assert plan.dependencies(last) == (Action("forward", 2, 1),)


def test_only_the_gradients_of_inputs_are_waited_for():
    plan = schedules.find("zero_bubble")(2, 2)
    needs = plan.dependencies(Action("backward_input", 0, 1))
    assert needs == (Action("forward", 0, 1), Action("backward_input", 1, 1))
    needs = plan.dependencies(Action("backward_weight", 0, 1))
    assert needs == (Action("backward_input", 0, 1),)


def test_actions_come_dependencies_first():
    found = schedules.gpipe(3, 2).actions(is_backward=True)
    assert [(a.stage, a.microbatch) for a in found] == [
        (2, 1),
        (1, 1),
        (2, 0),
        (0, 1),
        (1, 0),
        (0, 0),
    ]


def test_an_action_is_written_as_in_the_paper():
    assert str(Action("forward", 1, 3)) == "F3"
    assert str(Action("backward", 0, 12)) == "B12"
    assert str(Action("backward_input", 0, 1)) == "B1"
    assert str(Action("backward_weight", 0, 1)) == "W1"


def test_an_action_is_described_in_words():
    words = Action("backward_weight", 1, 3).describe()
    assert words == "backward weight of stage 1, microbatch 3"


def test_stages_that_share_a_device_are_told_apart():
    labels = schedules.interleaved(4, 2, num_devices=2).labels
    assert labels[Action("forward", 1, 0)] == "F0a"
    assert labels[Action("forward", 3, 0)] == "F0b"
    assert schedules.gpipe(2, 2).labels[Action("forward", 1, 0)] == "F0"


def test_an_empty_order_is_drawn():
    assert draw(Schedule(0, 0, ())) == ""


def test_the_placement_is_where_the_actions_are():
    assert schedules.interleaved(6, 2, num_devices=2).placement == (0, 1, 0, 1, 0, 1)
    swapped = schedules.one_f_one_b(2, 2)
    swapped = dataclasses.replace(swapped, orders=swapped.orders[::-1])
    assert swapped.placement == (1, 0)
    assert swapped.num_devices == 2


@pytest.mark.parametrize(
    ("plan", "at_once"),
    [
        (schedules.gpipe(2, 3), {(0, 2), (1, 2)}),
        (schedules.one_f_one_b(2, 3), {(1, 0), (1, 1), (1, 2)}),
        (schedules.gpipe(1, 2), {(0, 1)}),
        (schedules.find("zero_bubble")(2, 3), {(1, 0), (1, 1), (1, 2)}),
    ],
)
def test_a_backward_that_follows_at_once_is_known(plan, at_once):
    forwards = [(a.stage, a.microbatch) for a in plan.actions(is_backward=False)]
    assert {
        pair for pair in forwards if plan.backward_follows_immediately(*pair)
    } == at_once


def test_backwards_may_come_in_any_order():
    plan = written(
        "F0.0 F0.1 F0.2 B0.1 B0.0 B0.2",
        "F1.0 F1.1 B1.1 B1.0 F1.2 B1.2",
        num_stages=2,
        num_microbatches=3,
    )
    assert plan.validate() is plan
    assert draw(plan).splitlines() == [
        "stage 0  F0 F1 F2 .. B1 B0 .. B2",
        "stage 1  .. F0 F1 B1 B0 F2 B2 ..",
    ]


def test_a_schedule_of_ones_own_may_split_some_backwards():
    plan = written(
        "F0.0 F0.1 I0.0 W0.0 B0.1",
        "F1.0 B1.0 F1.1 I1.1 W1.1",
        num_stages=2,
        num_microbatches=2,
    )
    assert plan.validate() is plan
    needs = plan.dependencies(Action("backward", 0, 1))
    assert needs == (Action("forward", 0, 1), Action("backward_input", 1, 1))


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        (
            ["F0.0", "F1.0 B1.0"],
            r"Received one of 2 stages and 1 microbatches that lacks backward of stage "
            r"0, microbatch 0\.$",
        ),
        (["", "F1.0 B1.0"], r"lacks backward of stage 0, microbatch 0, and 1 more\.$"),
        (["F0.0 I0.0", "F1.0 B1.0"], "lacks backward weight of stage 0, microbatch 0"),
        (
            ["F0.0 B0.0", "F1.0 B1.0 B1.0"],
            r"Each action runs once\. Received twice: backward of stage 1, micro",
        ),
        (
            ["F0.0 B0.0 W0.0", "F1.0 B1.0"],
            "has beside all that is needed backward weight of stage 0, microbatch 0",
        ),
        (
            ["F0.0 B0.0", "F1.0 B1.0 F2.0"],
            "has beside all that is needed forward of stage 2, microbatch 0",
        ),
        (
            ["F0.0 B0.0", "F1.0 B1.0 B1.1"],
            "has beside all that is needed backward of stage 1, microbatch 1",
        ),
        (
            ["F0.0 B1.0 B0.0", "F1.0"],
            r"A stage runs on one device, where its weights are\. Received actions of "
            "stage 1 on devices 0 and 1",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(orders, words):
    plan = written(*orders, num_stages=2, num_microbatches=1)
    with pytest.raises(ValueError, match=words):
        plan.validate()


def test_forwards_out_of_order_are_refused():
    plan = written(
        "F0.1 F0.0 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1", num_stages=2, num_microbatches=2
    )
    words = r"forwards of stage 0 in the order \[1, 0\]\. Backwards can come in any"
    with pytest.raises(ValueError, match=words):
        plan.validate()


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        (
            ["B0.0 F0.0", "F1.0 B1.0"],
            "the backward of stage 0, microbatch 0, waits for the forward of stage 0, "
            "microbatch 0, which comes behind it on device 0",
        ),
        (
            # Each device wants the other to begin with the other microbatch.
            ["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"],
            "the backward of stage 0, microbatch 0, on device 0 waits for the backward "
            "of stage 1, microbatch 0, on device 1; the forward of stage 1, microbatch "
            "1, on device 1 waits for the forward of stage 0, microbatch 1, on device "
            "0. Put each action behind those it needs.",
        ),
    ],
)
def test_a_deadlock_is_told_as_the_story_of_who_waits_for_whom(orders, words):
    num_microbatches = 1 + ("1.1" in orders[1])
    plan = written(*orders, num_stages=2, num_microbatches=num_microbatches)
    with pytest.raises(ValueError, match="The schedule deadlocks: ") as caught:
        plan.validate()
    assert words in str(caught.value)


def test_waiting_for_what_no_device_runs_is_a_deadlock():
    plan = written("F0.0 B0.0", "F1.0", num_stages=2, num_microbatches=1)
    words = (
        "waits for the backward of stage 1, microbatch 0, which no device runs. Put "
        "each action behind"
    )
    with pytest.raises(ValueError, match=words):
        _ = plan.slots


def test_fewer_microbatches_are_the_first_ones():
    plan = schedules.one_f_one_b(2, 4)
    assert draw(plan.first_microbatches(3)) == draw(schedules.one_f_one_b(2, 3))
    assert plan.first_microbatches(4) is plan
    assert plan.first_microbatches(9) is plan


def test_a_device_holds_most_bytes_where_its_larger_stage_is_in_flight():
    """While most microbatches are in flight, few are on the stage that holds most."""
    plan = written(
        "F0.0 F0.1 F0.2 B0.0 F1.1 B0.1 B0.2 B1.1",
        num_stages=2,
        num_microbatches=3,
    )
    assert plan.in_flight == (3, 0)
    assert plan.most_held([1, 0]) == (3,)
    assert plan.most_held([1, 9]) == (2 + 9,)
    assert plan.most_held([0, 1]) == (1,)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [1, 5, 9, 2], [9, 0, 1, 4]])
def test_what_a_device_holds_is_counted_action_by_action(sizes):
    plan = schedules.interleaved(4, 7, num_devices=2)
    for order, most in zip(plan.orders, plan.most_held(sizes), strict=True):
        held, largest = 0, 0
        for action in order:
            held += action.kind.in_flight * sizes[action.stage]
            largest = max(largest, held)
        assert most == largest


def test_a_schedule_is_used_on_the_devices_and_microbatches_that_it_is_for():
    plan = schedules.one_f_one_b(2, 3)
    assert plan.on([0, 1], 3) is plan
    with pytest.raises(ValueError, match=r"is for 3 microbatches\. Received.*=4"):
        plan.on([0, 1], 4)
    with pytest.raises(ValueError, match=r"on devices \(0, 1\), by index\. Received"):
        plan.on([1, 0], 3)


def test_the_last_action_that_adds_gradients_is_known():
    def last(plan):
        return {str(a) + f".{a.stage}" for a in plan.slots if plan.is_last_gradient(a)}

    assert last(schedules.gpipe(2, 3)) == {"B0.0", "B0.1"}
    assert last(schedules.one_f_one_b(2, 3)) == {"B2.0", "B2.1"}
    assert last(schedules.find("zero_bubble")(2, 3)) == {"W2.0", "W2.1"}
    assert last(schedules.interleaved(4, 2, num_devices=2)) == {
        f"B1.{k}" for k in range(4)
    }
