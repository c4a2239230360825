"""Kinds of actions as values, and passes that insert them."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from tfgpipe import schedules
from tfgpipe.schedules import Action, ActionKind, kinds
from tfgpipe.schedules.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECOMPUTE,
)

pytestmark = pytest.mark.pure

NOTE = ActionKind("note", "n", "note", "#000000", is_backward=True)


def test_kinds_are_found_by_their_names():
    for kind in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
        assert kinds.find(kind.name) is kind
        assert Action(kind.name, 0, 1).kind is kind
    assert kinds.find(NOTE) is NOTE
    with pytest.raises(ValueError, match=r"'backward_weight', or .* Received 'note'"):
        kinds.find("note")


def test_kinds_are_equal_if_their_names_are():
    assert copy.deepcopy(FORWARD) == FORWARD
    assert hash(copy.deepcopy(FORWARD)) == hash(FORWARD)
    assert len({*map(copy.copy, (FORWARD, BACKWARD)), FORWARD, BACKWARD}) == 2
    assert repr(Action("forward", 0, 1)) == (
        "Action(kind='forward', stage=0, microbatch=1)"
    )


def test_kinds_that_occur_together_differ_in_color():
    for some in (
        [FORWARD, RECOMPUTE, BACKWARD],
        [FORWARD, RECOMPUTE, BACKWARD_INPUT, BACKWARD_WEIGHT],
    ):
        assert len({kind.color for kind in some}) == len(some)


def test_kinds_are_sorted_as_a_microbatch_has_them_and_others_last():
    some = [NOTE, BACKWARD, RECOMPUTE, FORWARD, BACKWARD]
    assert kinds.sort(some) == [FORWARD, RECOMPUTE, BACKWARD, NOTE]


def test_what_is_inserted_comes_before_each_and_holds_nothing():
    plain = schedules.find("zero_bubble")(2, 3)
    plan = plain.insert_before(NOTE, BACKWARD_INPUT).validate()
    assert schedules.draw(plan).splitlines()[1] == (
        "stage 1  .. F0 n0 B0 F1 n1 B1 W0 F2 n2 B2 W1 W2"
    )
    assert (plan.in_flight, plan.in_backward) == (plain.in_flight, plain.in_backward)
    assert plan.placement == plain.placement
    assert plan.splits_backwards
    assert not plain.insert_before(NOTE, BACKWARD).slots.keys() - plain.slots.keys()


def test_a_backward_follows_its_forward_whatever_is_inserted_between():
    plan = schedules.one_f_one_b(2, 4).insert_before(NOTE, BACKWARD)
    assert plan.backward_follows_immediately(1, 2)
    assert not plan.backward_follows_immediately(0, 0)


def test_an_inserted_action_waits_for_its_own_forward():
    plan = schedules.gpipe(2, 2).insert_before(NOTE, BACKWARD)
    note = Action(NOTE, 0, 1)
    assert plan.dependencies(note) == (Action("forward", 0, 1),)
    assert plan.receivers(note) == ()
    assert plan.receivers(Action("forward", 0, 1)) == (1,)
    assert plan.receivers(Action("backward", 1, 1)) == (0,)
    assert plan.receivers(Action("backward", 0, 1)) == ()
    early = dataclasses.replace(
        plan, orders=((note, *(a for a in plan.orders[0] if a != note)), plan.orders[1])
    )
    with pytest.raises(
        ValueError, match="the note of stage 0, microbatch 1, waits for"
    ):
        early.validate()
