"""The named schedules, against their drawings and what their papers claim of them."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.some_schedules import FOLDED, plans
from tfgpipe import Costs, schedules, simulate
from tfgpipe.schedules.named.interleaved import Interleaved
from tfgpipe.schedules.schedule import Action, draw

pytestmark = pytest.mark.pure


DRAWN = {
    "gpipe": (schedules.gpipe, schedules.gpipe(4, 8)),
    "1f1b": (schedules.one_f_one_b, schedules.one_f_one_b(4, 8)),
    "interleaved": (schedules.interleaved, schedules.interleaved(4, 8, num_devices=2)),
    "zero_bubble": (schedules.find("zero_bubble"), schedules.find("zero_bubble")(4, 8)),
    "eager_1f1b": (schedules.find("eager_1f1b"), schedules.find("eager_1f1b")(4, 8)),
    **{
        name: (schedules.find(name), schedules.find(name)(4, 4, num_devices=2))
        for name in ("looped_bfs", "interleaved_zb", *FOLDED)
    },
}


def in_flight(plan, k):
    """Returns the most microbatches that stage k has begun and not ended."""
    held = most = 0
    for action in plan.orders[plan.placement[k]]:
        if action.stage == k:
            held += (action.kind.name == "forward") - (
                action.kind.name in ("backward", "backward_weight")
            )
            most = max(most, held)
    return most


def test_every_named_schedule_is_drawn():
    assert set(DRAWN) == set(schedules.NAMES)


@pytest.mark.parametrize("name", schedules.NAMES)
def test_the_drawing_in_the_docstring_is_the_schedule(name):
    maker, plan = DRAWN[name]
    drawn = re.findall(r"^ +((?:stage|device) \d  .*)$", maker.__doc__, re.MULTILINE)
    assert "\n".join(drawn) == draw(plan)
    assert plan.name == name


@pytest.mark.parametrize("name", schedules.NAMES)
def test_the_table_in_the_docstring_has_a_row_for_each(name):
    assert f"\n| `{name}` |" in schedules.__doc__


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "drawn"),
    [
        (1, 1, ["stage 0  F0 B0"]),
        (1, 3, ["stage 0  F0 F1 F2 B2 B1 B0"]),
        (
            3,
            1,
            [
                "stage 0  F0 .. .. .. .. B0",
                "stage 1  .. F0 .. .. B0 ..",
                "stage 2  .. .. F0 B0 .. ..",
            ],
        ),
        (
            2,
            4,
            [
                "stage 0  F0 F1 F2 F3 .. .. B3 B2 B1 B0",
                "stage 1  .. F0 F1 F2 F3 B3 B2 B1 B0 ..",
            ],
        ),
    ],
)
def test_small_gpipes_are_those_drawn_by_hand(num_stages, num_microbatches, drawn):
    assert draw(schedules.gpipe(num_stages, num_microbatches)).splitlines() == drawn


def test_a_small_1f1b_is_that_drawn_by_hand():
    assert draw(schedules.one_f_one_b(2, 3)).splitlines() == [
        "stage 0  F0 F1 .. B0 F2 B1 .. B2",
        "stage 1  .. F0 B0 F1 B1 F2 B2 ..",
    ]


def test_a_small_zero_bubble_is_that_drawn_by_hand():
    assert draw(schedules.find("zero_bubble")(2, 3)).splitlines() == [
        "stage 0  F0 F1 .. B0 W0 F2 B1 W1 B2 W2",
        "stage 1  .. F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]


@given(plans())
def test_every_schedule_is_complete_and_can_be_run(plan):
    assert plan.validate() is plan
    slots = plan.slots
    split = sum(action.kind.name == "backward_weight" for action in slots)
    passes = plan.num_stages * plan.num_microbatches
    assert len(slots) == 2 * passes + split
    if plan.name != "dualpipe_v":
        assert split == (passes if schedules.find(plan.name).splits_backwards else 0)
    assert sum(map(len, plan.orders)) == len(slots)


@given(plans())
def test_every_action_runs_after_what_it_needs(plan):
    slots = plan.slots
    for action, slot in slots.items():
        assert all(slots[needed] < slot for needed in plan.dependencies(action))


@given(plans())
def test_a_device_runs_its_actions_in_their_order_one_at_a_time(plan):
    slots = plan.slots
    for order in plan.orders:
        times = [slots[action] for action in order]
        assert times == sorted(set(times))


@given(plans())
def test_stages_are_dealt_round_robin_or_fold_back(plan):
    K, P = plan.num_stages, plan.num_devices
    dealt = tuple(k % P for k in range(K))
    if plan.name in FOLDED and K > P:
        dealt = (*range(P), *reversed(range(P)))
    assert plan.placement == dealt == schedules.find(plan.name).deal(K, P)


@given(plans(), st.integers(1, 30))
def test_the_first_microbatches_of_any_schedule_are_one(plan, num_microbatches):
    fewer = plan.first_microbatches(num_microbatches)
    assert fewer.validate() is fewer
    assert fewer.num_microbatches == min(num_microbatches, plan.num_microbatches)
    for order, full in zip(fewer.orders, plan.orders, strict=True):
        kept = [a for a in full if a.microbatch < num_microbatches]
        assert list(order) == kept


@given(plans(names=["gpipe"]))
def test_gpipe_holds_all_microbatches(plan):
    flights = {in_flight(plan, k) for k in range(plan.num_stages)}
    assert flights == {plan.num_microbatches}


@given(plans(names=["1f1b"]))
def test_1f1b_holds_as_many_microbatches_as_stages_follow(plan):
    K, M = plan.num_stages, plan.num_microbatches
    assert [in_flight(plan, k) for k in range(K)] == [min(K - k, M) for k in range(K)]


@given(plans(names=["zero_bubble"]))
def test_zero_bubble_holds_at_most_as_many_microbatches_as_stages(plan):
    K, M = plan.num_stages, plan.num_microbatches
    assert max(in_flight(plan, k) for k in range(K)) == min(K, M)


@given(plans(names=["gpipe", "1f1b", "zero_bubble"]))
def test_what_stages_hold_is_counted_to_the_end_of_their_backwards(plan):
    if plan.num_devices == plan.num_stages:
        held = tuple(in_flight(plan, k) for k in range(plan.num_stages))
        assert plan.in_flight == held


@given(plans(names=["interleaved"]))
def test_interleaved_holds_what_its_warm_up_begins(plan):
    """Megatron-LM's number of warm-up forwards, and the one after them."""
    P, v = plan.num_devices, plan.num_stages // plan.num_devices
    for p, order in enumerate(plan.orders):
        held = most = 0
        for action in order:
            held += 1 if action.kind.name == "forward" else -1
            most = max(most, held)
        lead = P - p if v == 1 else 2 * (P - 1 - p) + (v - 1) * P + 1
        assert most <= min(lead, v * plan.num_microbatches)
        if plan.num_microbatches % P == 0:
            assert most == min(lead, v * plan.num_microbatches)


@given(st.integers(0, 3), st.integers(2, 5), st.integers(2, 3), st.data())
def test_interleaved_runs_microbatches_ahead_and_holds_them(ahead, P, v, data):
    M = data.draw(st.integers(P, 3 * P + 2))
    plan = Interleaved(num_ahead=ahead)(v * P, M, num_devices=P).validate()
    held = plan.most_held([1] * plan.num_stages)
    most = [2 * (P - 1 - p) + (v - 1) * P + 1 + ahead for p in range(P)]
    assert all(x <= y for x, y in zip(held, most, strict=True))
    first = [a.stage for a in plan.orders[0]][: min(P + ahead, M) + 1]
    assert first == [*[0] * min(P + ahead, M), P]


@pytest.mark.parametrize(("P", "v"), [(4, 2), (4, 3), (8, 3)])
def test_microbatches_ahead_hide_p_transfers(P, v):
    def exposed(ahead, size=P):
        policy = Interleaved(num_ahead=ahead, group_size=size)
        plan = policy(v * P, 8 * P, num_devices=P)
        costs = Costs(latency=1 / 64)  # P of them take less than a forward.
        return simulate(plan, costs).exposed_communication * 64

    assert exposed(0) == pytest.approx(2 * (P * v - 1))
    assert exposed(1) == pytest.approx(2 * (P * v - 1) - P)
    assert exposed(0, size=2 * P) == pytest.approx(2 * (P - 1))


def test_fewer_than_no_microbatches_ahead_are_refused():
    with pytest.raises(
        ValueError, match="`num_ahead` must be an integer of at least 0"
    ):
        Interleaved(num_ahead=-1)


def test_interleaved_with_one_stage_a_device_is_1f1b():
    assert draw(schedules.interleaved(3, 5, num_devices=3)) == draw(
        schedules.one_f_one_b(3, 5)
    )


@given(st.integers(2, 4), st.integers(2, 3), st.integers(0, 6), st.integers(0, 20))
def test_interleaved_takes_larger_groups(P, v, more, rest):
    policy = dataclasses.replace(schedules.interleaved, group_size=P + more)
    plan = policy(v * P, P + rest, num_devices=P).validate()
    held = tuple(in_flight(plan, k) for k in range(v * P))
    assert max(held) <= min(P + rest, (v - 1) * (P + more) + 2 * P)
    assert policy.in_flight(v * P, 8 * (P + more), P) == (
        policy(v * P, 8 * (P + more), num_devices=P).in_flight
    )


def test_a_group_fills_all_devices():
    policy = dataclasses.replace(schedules.interleaved, group_size=3)
    with pytest.raises(ValueError, match=r"group_size=3 for 4 devices. Use 4, or 2"):
        policy(8, 8, num_devices=4)
    with pytest.raises(ValueError, match="group_size"):
        dataclasses.replace(schedules.interleaved, group_size=0)
    assert schedules.find("interleaved") == dataclasses.replace(policy, group_size=None)


@given(st.integers(2, 5), st.integers(2, 3), st.integers(1, 4), st.data())
def test_interleaved_takes_microbatches_that_leave_a_rest(P, v, groups, data):
    M = groups * P + data.draw(st.integers(1, P - 1))
    plan = schedules.interleaved(v * P, M, num_devices=P).validate()
    assert plan.num_microbatches == M
    # The rest is what the next full group would begin with.
    full = schedules.interleaved(v * P, (groups + 1) * P, num_devices=P)
    assert plan.orders == full.first_microbatches(M).orders


@pytest.mark.parametrize("name", schedules.NAMES)
def test_128_microbatches_on_64_devices_can_be_run(name):
    v = min(schedules.find(name).stages_per_device)
    plan = schedules.make(name, num_stages=64 * v, num_microbatches=128, num_devices=64)
    assert plan.validate().num_devices == 64


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_one_stage_is_a_schedule_of_every_name(name, num_microbatches):
    plan = schedules.make(
        name, num_stages=1, num_microbatches=num_microbatches
    ).validate()
    assert plan.name == name
    assert plan.num_devices == 1
    assert max(plan.slots.values()) + 1 == len(plan.slots)


@pytest.mark.parametrize("name", schedules.NAMES)
def test_a_name_makes_what_its_function_makes(name):
    plan = DRAWN[name][1]
    made = schedules.make(
        name,
        num_stages=4,
        num_microbatches=plan.num_microbatches,
        num_devices=plan.num_devices,
    )
    assert made == plan


def test_gpipe_places_several_stages_on_a_device():
    plan = schedules.gpipe(4, 2, num_devices=2).validate()
    assert draw(plan).splitlines()[1].startswith("device 1  ... F0a F1a F0b F1b B1b")


def test_weights_wait_longer_on_later_stages():
    order = schedules.find("zero_bubble")(3, 4).orders[2]
    first = order.index(Action("backward_weight", 2, 0))
    assert Action("backward_input", 2, 2) in order[:first]
    assert Action("backward_input", 2, 3) not in order[:first]


@pytest.mark.parametrize(
    ("name", "num_stages", "num_devices"),
    [("1f1b", 4, 4), ("interleaved", 8, 4), ("zero_bubble", 4, 4)],
)
def test_too_few_microbatches_are_refused(name, num_stages, num_devices):
    words = (
        rf"Schedule '{name}' needs at least as many microbatches.*Received "
        rf"num_microbatches=3 for 4 devices\. Use num_microbatches=4 or more, or "
        'schedule="gpipe"'
    )
    with pytest.raises(ValueError, match=words):
        schedules.make(
            name, num_stages=num_stages, num_microbatches=3, num_devices=num_devices
        )


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_stages_that_devices_do_not_divide_are_refused(name):
    words = r"as many to each\. Received 5 stages for 2 devices\. Make `num_stages`"
    with pytest.raises(ValueError, match=words):
        schedules.make(name, num_stages=5, num_microbatches=8, num_devices=2)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_several_stages_a_device_are_refused_where_there_is_one(name):
    words = (
        rf"Schedule '{name}' has one stage a device\. Received 4 stages for 2 devices\."
        ' Use schedule="interleaved"'
    )
    with pytest.raises(ValueError, match=words):
        schedules.make(name, num_stages=4, num_microbatches=8, num_devices=2)


def test_an_unknown_name_lists_those_there_are():
    words = (
        "must be one of 'gpipe', '1f1b', 'interleaved', .*'dualpipe_v', or a "
        r"`tfgpipe\.Schedule` of your own\. Received '1F1B'"
    )
    with pytest.raises(ValueError, match=words):
        schedules.make("1F1B", num_stages=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "words"),
    [
        (2, -1, "`num_microbatches` must be an integer of at least 1. Received -1"),
        (0, 4, "`num_stages` must be an integer of at least 1. Received 0"),
        (2, 10**9, "`num_microbatches` must be .* at most 1,048,576"),
        (2**10, 2**11, "num_stages=1024 and num_microbatches=2048. Use fewer"),
    ],
)
@pytest.mark.parametrize("name", schedules.NAMES)
def test_counts_out_of_bounds_are_refused_before_any_action(
    name, num_stages, num_microbatches, words
):
    with pytest.raises(ValueError, match=words):
        schedules.make(name, num_stages=num_stages, num_microbatches=num_microbatches)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("forwards", 0, 0), r"a kind, one of 'forward', .* Received 'forwards'\."),
        (("forward", -1, 0), r"at least 0\. Received Action\('forward', -1, 0\)"),
        (("forward", 0, -1), r"at least 0\. Received Action\('forward', 0, -1\)"),
    ],
)
def test_actions_that_cannot_be_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Action(*wrong)


@given(plans())
def test_a_policy_tells_what_its_schedules_hold(plan):
    policy, K = schedules.find(plan.name), plan.num_stages
    sizes = K, plan.num_microbatches
    assert policy.in_flight(*sizes, plan.num_devices) == plan.in_flight
    if plan.name != "dualpipe_v":  # It splits the first and the last alone.
        assert policy.splits_backwards == plan.splits_backwards


def test_a_policy_or_a_schedule_is_found_as_it_is():
    plan = schedules.gpipe(2, 2)
    assert schedules.find(plan) is plan
    assert schedules.find("1f1b") is schedules.find(schedules.one_f_one_b)
    assert schedules.one_f_one_b == type(schedules.one_f_one_b).from_config({})
    with pytest.raises(TypeError, match=r"`tfgpipe\.Schedule`\. Received 3\."):
        schedules.find(3)


def of_a_device(plan):
    """Returns the most microbatches of one stage that each device holds."""
    return plan.most_held([1] * plan.num_stages)


def waited(plan):
    """Returns the passes by which a step is longer than its work; all take 1."""
    passes = plan.num_stages // plan.num_devices * 3 * plan.num_microbatches
    return simulate(plan, Costs(forward=1, backward=2)).timeline.step_time - passes


# Qi et al. 2024, "Pipeline Parallelism with Controllable Memory": the bubble, in passes
# of one of the two stages of a device, and the microbatches that a device holds. Their
# bubble of V-ZB is 0, counted from a device's first pass: the last device begins P - 1
# passes late, which no order avoids.
CONTROLLED = {
    "zbv": (lambda P: P - 1, lambda P: P),
    "v_half": (lambda P: 3 * P, lambda P: (P + 2) // 2),
    "v_min": (lambda P: 4 * P, lambda P: (P + 4) // 3),
}


@given(st.sampled_from(list(CONTROLLED)), st.integers(2, 9), st.integers(0, 12))
def test_folded_schedules_have_the_published_bubble_and_memory(name, P, more):
    bubble, held = CONTROLLED[name]
    plan = schedules.find(name)(2 * P, P + more, num_devices=P).validate()
    assert P - 1 <= waited(plan) <= bubble(P)
    assert max(of_a_device(plan)) <= 2 * held(P)
    if more >= P:
        assert max(of_a_device(plan)) == 2 * held(P)


@pytest.mark.parametrize("P", range(2, 10))
def test_folded_schedules_wait_as_long_as_their_docstrings_say(P):
    def of(name):
        return waited(schedules.find(name)(2 * P, 3 * P, num_devices=P))

    assert of("zbv") == P - 1
    assert of("v_min") == 4 * P - 5
    assert of("v_half") == (2 if P == 2 else 3 * P - 4 if P % 2 else 3 * P - 5)


@given(st.integers(2, 7), st.integers(0, 9))
def test_dualpipe_v_waits_less_than_published_and_holds_as_much(P, more):
    plan = schedules.find("dualpipe_v")(2 * P, 2 * P + more, num_devices=P)
    f, b, w = 10, 11, 8
    costs = Costs(forward=f, backward=b + w, backward_input=b, backward_weight=w)
    step = simulate(plan.validate(), costs).timeline.step_time
    bubble = step - 2 * plan.num_microbatches * (f + b + w)
    # DeepSeek's table: (PP / 2 - 1) (F&B + B - 3 W), PP + 1, of PP = 2 P stages.
    assert bubble <= (P - 1) * ((f + b + w) + (b + w) - 3 * w)
    assert bubble == (P - 1) * (f + b - w)
    assert max(of_a_device(plan)) == 2 * P + 1


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 3))
def test_interleaved_zb_divides_the_bubble_of_zb_h1(P, v, groups):
    plan = schedules.find("interleaved_zb")(v * P, groups * P, num_devices=P)
    assert waited(plan.validate()) == P - 1
    assert max(of_a_device(plan)) == v * P


@given(st.integers(2, 6), st.integers(2, 4), st.data())
def test_looped_bfs_divides_the_bubble_of_gpipe(P, v, data):
    M = data.draw(st.integers(P, 3 * P))
    plan = schedules.find("looped_bfs")(v * P, M, num_devices=P).validate()
    bubble = simulate(plan, Costs()).timeline.bubble
    assert bubble == pytest.approx((P - 1) / (v * M + P - 1))
    assert of_a_device(plan) == (v * M,) * P


@given(st.integers(1, 7), st.integers(0, 12))
def test_eager_1f1b_has_the_bubble_of_1f1b_and_hides_forward_transfers(K, more):
    M = K + more
    plan = schedules.find("eager_1f1b")(K, M).validate()
    assert simulate(plan, Costs()).timeline.bubble == pytest.approx(
        (K - 1) / (M + K - 1)
    )
    assert plan.in_flight == tuple(min(2 * (K - k) - 1, M) for k in range(K))
    costs = Costs(latency=0.25)
    usual = simulate(schedules.one_f_one_b(K, M), costs).exposed_communication
    eager = simulate(plan, costs).exposed_communication
    assert eager < usual if K > 2 and M > K else eager <= usual


@given(st.sampled_from(FOLDED), st.integers(2, 6), st.integers(1, 6))
def test_folded_schedules_take_fewer_microbatches_than_devices(name, P, M):
    plan = schedules.find(name)(2 * P, M, num_devices=P)
    assert plan.validate() is plan


@pytest.mark.parametrize("name", FOLDED)
def test_folded_schedules_have_two_stages_on_each_device(name):
    words = r"two stages on each device.*Received 8 stages for 2 devices\. Use num_stag"
    with pytest.raises(ValueError, match=words):
        schedules.find(name)(8, 8, num_devices=2)


@given(plans())
def test_backwards_of_a_stage_add_their_gradients_in_order(plan):
    if plan.name not in ("gpipe", "looped_bfs"):  # Those go backwards.
        for k in range(plan.num_stages):
            order = [
                a.microbatch
                for a in plan.orders[plan.placement[k]]
                if a.stage == k and a.kind.adds_gradients
            ]
            assert order == sorted(order)
