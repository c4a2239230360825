"""Microbatches that wait on the host: where copies go, and what devices hold."""

from __future__ import annotations

import dataclasses

import pytest

import tfgpipe
from tfgpipe import schedules
from tfgpipe.schedules import Offload
from tfgpipe.schedules.kinds import OFFLOAD, RELOAD

pytestmark = pytest.mark.pure

SIZES = [(2, 4), (4, 4), (4, 9), (6, 12), (8, 16)]


def drawn(schedule: schedules.Schedule, p: int = 0) -> str:
    """Returns the order of a device, without the waits between."""
    return " ".join(map(str, schedule.orders[p]))


def passes(schedule: schedules.Schedule) -> list[list[schedules.Action]]:
    return [[a for a in order if a.kind.is_pass] for order in schedule.orders]


def made(
    name: str, num_stages: int, num_microbatches: int, **options: int
) -> tuple[schedules.Schedule, schedules.Schedule]:
    """Returns a named schedule, and the same with offload."""
    policy = schedules.find(name)
    assert isinstance(policy, schedules.SchedulePolicy)
    both = []
    for each in (policy, Offload(policy, **options)):
        placement = each.deal(num_stages, each.choose_num_devices(num_stages, 8))
        both.append(each.on(placement, num_microbatches))
    return both[0], both[1]


def test_a_small_gpipe_offloads_as_drawn_by_hand():
    """GPipe's first microbatches leave: their backwards come last."""
    plan = Offload(schedules.gpipe, most_held=2, ahead=1)(1, 5)
    assert drawn(plan) == (
        # When F2 begins F0 has to be gone, whose copy began a pass before.
        "F0 F1 O0 F2 O1 F3 O2 F4 B4 R2 B3 R1 B2 R0 B1 B0"
    )
    assert plan.in_flight == (2,)


def test_the_drawing_in_the_docstring_is_the_schedule():
    assert Offload.__doc__ is not None
    for name in ("1f1b", "1f1b+offload"):
        row = schedules.draw(schedules.find(name)(4, 6)).splitlines()[0]
        assert row.removeprefix("stage 0  ") in Offload.__doc__


def test_copies_have_as_many_passes_as_asked_for():
    plan = Offload(schedules.gpipe, most_held=4, ahead=2)(1, 7)
    assert drawn(plan) == (
        "F0 F1 F2 F3 O0 F4 O1 F5 O2 F6 B6 B5 R2 B4 R1 B3 R0 B2 B1 B0"
    )


@pytest.mark.parametrize(("K", "M"), SIZES)
@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize("ahead", [1, 2])
def test_whatever_the_schedule_copies_only_move_what_is_there(name, K, M, ahead):
    """A walk over each order with the microbatches that are on the device."""
    plain, plan = made(name, K, M, most_held=3, ahead=ahead)
    assert passes(plan) == passes(plain)
    plan.validate()
    for order in plan.orders:
        here, away = set(), set()
        for i, action in enumerate(order):
            visit = action.stage, action.microbatch
            if action.kind == OFFLOAD:
                here.remove(visit)
                away.add(visit)
                # A pass at least goes by until it begins to come back.
                back = order.index(action.of(RELOAD))
                assert any(a.kind.is_pass for a in order[i:back])
            elif action.kind == RELOAD:
                away.remove(visit)
                here.add(visit)
                used = next(
                    j
                    for j, a in enumerate(order)
                    if (a.stage, a.microbatch) == visit
                    and a.kind.is_pass
                    and a.kind.is_backward
                )
                between = [a for a in order[i:used] if a.kind.is_pass]
                assert len(between) == ahead
            elif action.kind.in_flight > 0:
                here.add(visit)
            else:
                assert visit in here
            if action.kind.is_pass and action.kind.in_flight < 0:
                here.remove(visit)
        assert not here
        assert not away


@pytest.mark.parametrize(("K", "M"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_no_device_holds_more_than_asked_for(name, K, M):
    for most in (3, 4, 5):
        plain, plan = made(name, K, M, most_held=most)
        expected = [min(most, held) for held in plain.in_flight]
        assert [*plan.in_flight] == expected
        assert plan.has_copies == (max(plain.in_flight) > most)


def test_the_more_stay_the_less_is_copied():
    counts = [
        sum(a.kind == OFFLOAD for a in made("1f1b", 8, 24, most_held=n)[1].orders[0])
        for n in range(3, 10)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 20 // 2
    assert counts[-2:] == [0, 0]


def test_as_many_stay_as_the_memory_of_each_device_allows():
    costs = tfgpipe.Costs(kept_bytes=10, fixed_bytes=100, backward_bytes=5)
    plain = schedules.one_f_one_b(6, 12)
    assert tfgpipe.simulate(plain, costs).peak_bytes[0] == 165
    for limit in (135, 145, 155, 165):
        policy = Offload(schedules.one_f_one_b).fitted(lambda: costs, limit)
        plan = policy(6, 12)
        fit = (limit - 105) // 10
        assert plan.in_flight == tuple(min(fit, n) for n in plain.in_flight)
        assert max(tfgpipe.simulate(plan, costs).peak_bytes) <= limit
    both = Offload(schedules.one_f_one_b).fitted(lambda: costs, (135, *[165] * 5))
    assert both(6, 12).in_flight == (3, 5, 4, 3, 2, 1)


def test_a_given_number_is_kept_whatever_the_memory():
    policy = Offload(schedules.one_f_one_b, most_held=4)
    assert policy.fitted(lambda: pytest.fail("No costs."), 1.0) is policy


def test_a_name_finds_it():
    assert schedules.find("zbv+offload") == Offload(schedules.find("zbv"))
    assert schedules.find("zbv+offload").name == "zbv+offload"
    found = tfgpipe.simulation.find_schedule("auto+offload")
    assert found == Offload(tfgpipe.simulation.AutoSchedule())
    with pytest.raises(ValueError, match=r"must be one of 'gpipe'.*Received 'zbw'"):
        schedules.find("zbw+offload")


def test_values_that_are_none():
    with pytest.raises(TypeError, match=r"`schedule` must be .*find\(\"zbv\"\)"):
        Offload("1f1b")
    with pytest.raises(ValueError, match="most_held"):
        Offload(schedules.gpipe, most_held=0)
    with pytest.raises(ValueError, match="ahead"):
        Offload(schedules.gpipe, ahead=0)


def test_a_schedule_as_a_value():
    plan = Offload(schedules.gpipe, most_held=2).insert(schedules.gpipe(2, 4))
    assert plan.name == "gpipe+offload"
    assert plan == Offload(schedules.gpipe, most_held=2)(2, 4)
    assert plan.without_copies() == dataclasses.replace(
        schedules.gpipe(2, 4), name="gpipe+offload"
    )


def test_the_backward_waits_for_the_copy_and_the_copy_for_the_forward():
    plan = Offload(schedules.gpipe, most_held=2)(1, 4)
    action = schedules.Action("backward", 0, 0)
    assert plan.dependencies(action) == (action.of(RELOAD),)
    assert plan.dependencies(action.of(RELOAD)) == (action.of(OFFLOAD),)
    assert [a.kind.name for a in plan.dependencies(action.of(OFFLOAD))] == ["forward"]
