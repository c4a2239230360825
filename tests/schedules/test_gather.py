"""Weights that are gathered for some passes: where, and what devices hold."""

from __future__ import annotations

import itertools

import pytest

import tfgpipe
from tfgpipe import schedules
from tfgpipe.schedules import Gather

pytestmark = pytest.mark.pure

NAMES = [name for name in schedules.NAMES if schedules.find(name).deals_stages]


def made(name, *, P=4, M=8, **options):
    """Returns a named schedule, and the same with gathers."""
    policy = schedules.find(name)
    K = P * min(policy.stages_per_device)
    both = (policy, Gather(policy, **options))
    return [each(K, M, num_devices=P).validate() for each in both]


def drawn(plan, p=0):
    return " ".join(plan.labels[action] for action in plan.orders[p])


def test_the_drawing_in_the_docstring_is_the_schedule():
    for name in ("looped_bfs", "looped_bfs+gather"):
        row = drawn(schedules.find(name)(4, 2, num_devices=2))
        assert row.replace("F1b B1b", "F1b .. .. B1b") in Gather.__doc__


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_device_that_comes_to_a_stage_has_gathered_its_weights(name, ahead):
    plain, plan = made(name, ahead=ahead)
    assert plan.name == f"{name}+gather"
    assert plan.without_copies().orders == plain.orders
    for order in plan.orders:
        passes = [a for a in order if a.kind.is_pass]
        comes = [passes[0]] + [
            b for a, b in itertools.pairwise(passes) if a.stage != b.stage
        ]
        gathers = [a for a in order if a.kind.gathers]
        assert [(a.stage, a.microbatch) for a in gathers] == [
            (a.stage, a.microbatch) for a in comes
        ]
        for gather, action in zip(gathers, comes, strict=True):
            assert gather in plan.dependencies(action)
            between = order[order.index(gather) : order.index(action)]
            assert sum(a.kind.is_pass for a in between) == min(
                ahead, passes.index(action)
            )


def test_a_gather_for_every_pass():
    plan = Gather(schedules.one_f_one_b, every_pass=True)(2, 2)
    assert drawn(plan) == "G0 G1 F0 G0 F1 G1 B0 B1"
    once = Gather(schedules.one_f_one_b)(2, 2)
    assert drawn(once) == "G0 F0 F1 B0 B1"


def test_evaluation_gathers_once():
    plain, plan = made("interleaved")
    assert plan.without_copies().orders == plain.orders


def test_bytes_that_devices_hold():
    """Of four stages on a device, with one ahead, two are whole at most."""
    v, P = 4, 2
    costs = tfgpipe.Costs(gathered_bytes=1, gather_bandwidth=2)
    for name, most in (("looped_bfs", v), ("looped_bfs+gather", 2)):
        plan = schedules.find(name)(v * P, 4, num_devices=P)
        assert tfgpipe.simulate(plan, costs).peak_bytes == (most,) * P


def test_a_gather_takes_time_beside_the_passes_before():
    def step_time(bandwidth):
        costs = tfgpipe.Costs(
            forward=1, backward=2, gathered_bytes=1, gather_bandwidth=bandwidth
        )
        plan = schedules.find("looped_bfs+gather")(4, 4, num_devices=2)
        return tfgpipe.simulate(plan, costs).timeline.step_time

    plain = tfgpipe.simulate(
        schedules.find("looped_bfs")(4, 4, num_devices=2), tfgpipe.Costs()
    )
    # All but the first are hidden: they take as long as the pass before, or half.
    assert step_time(1) == plain.timeline.step_time + 1
    assert step_time(2) == plain.timeline.step_time + 0.5
    # A second gather of a forward's length is waited for where it takes longer.
    assert step_time(0.5) > plain.timeline.step_time + 2


def test_suffixes_add_up():
    policy = schedules.find("looped_bfs+offload+gather")
    assert policy.name == "looped_bfs+offload+gather"
    plan = policy(8, 4, num_devices=2).validate()
    kinds = {a.kind.name for order in plan.orders for a in order}
    assert {"offload", "reload", "gather_forward", "gather_backward"} <= kinds


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((schedules.gpipe, 0), ValueError), (("gpipe",), TypeError)],
)
def test_wrong_arguments_are_refused(arguments, error):
    with pytest.raises(error, match=r"ahead|schedule"):
        Gather(*arguments)
