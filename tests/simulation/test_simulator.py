"""Simulated times, against closed forms and examples worked out by hand."""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpipe import schedules
from tfgpipe.schedules.schedule import Action, Schedule
from tfgpipe.simulation.simulator import Costs, costs_of, simulate
from tfgpipe.simulation.timeline import Span, Timeline

pytestmark = pytest.mark.pure

SECONDS = st.integers(1, 20)


def step_time(plan, **costs):
    return simulate(plan, Costs(**costs)).timeline.step_time


def times(timeline, kind, stage):
    """Returns start and end of the spans of a kind and stage, by microbatch."""
    found = [s for s in timeline.spans if (s.kind.name, s.stage) == (kind, stage)]
    return {span.microbatch: (span.start, span.end) for span in found}


def share(timeline):
    """Returns the bubble as a fraction; times are whole numbers."""
    step, P = Fraction(timeline.step_time), timeline.schedule.num_devices
    return 1 - sum(map(Fraction, timeline.busy)) / (step * P)


@given(st.integers(1, 8), st.integers(0, 20), SECONDS, SECONDS)
def test_the_bubble_of_gpipe_and_1f1b_is_that_of_their_papers(K, more, f, b):
    """Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.1."""
    M = K + more
    for plan in (schedules.gpipe(K, M), schedules.one_f_one_b(K, M)):
        timeline = simulate(plan, Costs(forward=f, backward=b)).timeline
        assert share(timeline) == Fraction(K - 1, M + K - 1)
        assert timeline.bubble == pytest.approx((K - 1) / (M + K - 1), abs=1e-12)


@given(st.integers(1, 6), st.integers(1, 20), SECONDS, SECONDS)
def test_gpipe_has_that_bubble_with_fewer_microbatches_too(K, M, f, b):
    timeline = simulate(schedules.gpipe(K, M), Costs(forward=f, backward=b)).timeline
    assert share(timeline) == Fraction(K - 1, M + K - 1)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), SECONDS, SECONDS)
def test_interleaving_divides_the_bubble(P, v, groups, f, b):
    """Narayanan et al. 2021, section 2.2.2, with M a multiple of P."""
    M = groups * P
    plan = schedules.interleaved(v * P, M, num_devices=P)
    timeline = simulate(plan, Costs(forward=f, backward=b)).timeline
    assert share(timeline) == Fraction(P - 1, v * M + P - 1)
    # Of the devices' time, of which there are fewer than stages.
    assert timeline.bubble == pytest.approx((P - 1) / (v * M + P - 1), abs=1e-12)
    assert timeline.efficiency == pytest.approx(1 - timeline.bubble)


@given(st.integers(1, 8), st.integers(0, 15), SECONDS, SECONDS, SECONDS)
def test_zero_bubble_waits_as_long_as_its_docstring_says(K, more, f, b, w):
    """Qi et al. 2024, section 2.3, has it for w up to f and b."""
    plan = schedules.find("zero_bubble")(K, K + more)
    costs = Costs(forward=f, backward_input=b, backward_weight=w)
    timeline = simulate(plan, costs).timeline
    bubbles = {timeline.step_time - busy for busy in timeline.busy}
    assert bubbles == {(K - 1) * (f + b - min(f, b, w))}
    if w <= min(f, b):
        assert bubbles == {(K - 1) * (f + b - w)}


@given(st.integers(1, 8), st.integers(0, 15))
def test_zero_bubble_of_equal_times_has_the_bubble_of_the_table(K, more):
    M = K + more
    timeline = simulate(
        schedules.find("zero_bubble")(K, M), Costs(forward=3, backward=6)
    ).timeline
    assert share(timeline) == Fraction(K - 1, 3 * M + K - 1)


@given(st.integers(2, 6), st.integers(0, 9))
def test_zero_bubble_is_shorter_than_1f1b(K, more):
    M = K + more
    assert step_time(schedules.find("zero_bubble")(K, M)) < step_time(
        schedules.one_f_one_b(K, M)
    )


@given(
    st.sampled_from(schedules.NAMES), st.integers(1, 5), st.integers(0, 7), st.data()
)
def test_a_simulated_step_follows_its_schedule(name, P, more, data):
    v = 2 if name == "interleaved" else 1
    plan = schedules.make(
        name, num_stages=v * P, num_microbatches=P + more, num_devices=P
    )
    each = st.tuples(*[st.integers(0, 9)] * (v * P))
    costs = Costs(
        forward=tuple(1 + f for f in data.draw(each)),
        backward=data.draw(each),
        recompute=data.draw(st.integers(0, 2)),
        latency=data.draw(st.integers(0, 3)),
    )
    timeline = simulate(plan, costs).timeline
    spans = {
        Action(s.kind.name, s.stage, s.microbatch): s
        for s in timeline.spans
        if s.kind.name != "recompute"
    }
    assert set(spans) == set(plan.slots)
    for action, span in spans.items():
        assert span.device == plan.placement[action.stage]
        assert span.duration == action.kind.seconds(costs, action.stage)
        for needed in plan.dependencies(action):
            far = spans[needed].device != span.device
            assert spans[needed].end + costs.latency * far <= span.start
    for order in plan.orders:
        ends = [spans[action].end for action in order]
        starts = [spans[action].start for action in order]
        assert all(a <= b for a, b in zip(ends, starts[1:], strict=False))


def test_uneven_stages_wait_for_the_slowest():
    # stage 0  F0 .. F1 .. ..    stage 1 takes 3 forward, 6 backward
    costs = Costs(forward=(1, 3), backward=(2, 6))
    simulation = simulate(schedules.one_f_one_b(2, 2), costs)
    timeline = simulation.timeline
    assert times(timeline, "forward", 1) == {0: (1, 4), 1: (10, 13)}
    assert times(timeline, "backward", 1) == {0: (4, 10), 1: (13, 19)}
    assert times(timeline, "backward", 0) == {0: (10, 12), 1: (19, 21)}
    assert timeline.busy == (6, 18)
    assert timeline.imbalance == 1.5


def test_recomputation_comes_right_before_the_backward():
    timeline = simulate(schedules.one_f_one_b(2, 2), Costs(recompute=1)).timeline
    for k in range(2):
        again, backward = (
            times(timeline, kind, k) for kind in ("recompute", "backward")
        )
        assert {m: end for m, (_, end) in again.items()} == {
            m: start for m, (start, _) in backward.items()
        }
    assert timeline.step_time == (2 + 2 - 1) * (1 + 1 + 2)
    # 6 of the 8 seconds that each device works are of use, of 12.
    assert timeline.efficiency == pytest.approx(6 / 12)


def test_split_backwards_recompute_before_the_first_half():
    timeline = simulate(
        schedules.find("zero_bubble")(2, 2), Costs(recompute=1)
    ).timeline
    assert len(times(timeline, "recompute", 1)) == 2
    assert times(timeline, "recompute", 1)[0] == (2, 3)
    assert times(timeline, "backward_input", 1)[0] == (3, 4)


def test_the_default_unit_is_a_forward():
    assert step_time(schedules.gpipe(4, 8)) == 33
    assert Costs().seconds("backward_input", 0) == 1
    halves = Costs(backward=6, backward_input=1, backward_weight=(5, 4))
    assert halves.seconds("backward_input", 1) == 1
    assert halves.seconds("backward_weight", 1) == 4
    assert halves.seconds("backward", 1) == 6


def test_one_microbatch_pays_for_both_ways():
    # Forward 1, 3 there, forward 1 and backward 2, 3 back, backward 2.
    transfers = {"latency": 1, "bandwidth": 4, "boundary_bytes": 8}
    assert step_time(schedules.gpipe(2, 1), **transfers) == 1 + 3 + 3 + 3 + 2
    simulation = simulate(schedules.gpipe(2, 1), Costs(**transfers))
    assert simulation.exposed_communication == 6
    assert [(t.start, t.end) for t in simulation.timeline.transfers] == [
        (1, 4),
        (7, 10),
    ]
    assert [(t.from_stage, t.to_stage) for t in simulation.timeline.transfers] == [
        (0, 1),
        (1, 0),
    ]


def test_transfers_on_one_link_go_one_after_the_other():
    """Forward 1, backward 2; each transfer takes the link 2, and a latency of 1/2.

    device 0      F0 0-1, F1 1-2                              B1 11-13, B0 13-15
    link 0 to 1   0 from 1 to 3, 1 from 3 to 5
    device 1      F0 3.5-4.5, F1 5.5-6.5, B1 6.5-8.5, B0 8.5-10.5
    link 1 to 0   1 from 8.5 to 10.5, 0 from 10.5 to 12.5
    """
    costs = Costs(latency=0.5, bandwidth=2, boundary_bytes=4)
    simulation = simulate(schedules.gpipe(2, 2), costs)
    timeline = simulation.timeline
    assert times(timeline, "forward", 1) == {0: (3.5, 4.5), 1: (5.5, 6.5)}
    assert times(timeline, "backward", 1) == {1: (6.5, 8.5), 0: (8.5, 10.5)}
    assert times(timeline, "backward", 0) == {1: (11, 13), 0: (13, 15)}
    assert [(t.start, t.end) for t in timeline.transfers] == [
        (1, 3.5),
        (3, 5.5),
        (8.5, 11),
        (10.5, 13),
    ]
    assert simulation.exposed_communication == 15 - 9


def test_1f1b_of_uneven_stages_with_transfers_is_that_worked_out_by_hand():
    """Each transfer takes its link 2, and a latency of 1; r recomputes in 1.

    device 0      F0 0-2, F1 2-4, r0 13, B0 14-18, F2 18-20, r1, B1 21-25, r2 31, B2 -36
    link 0 to 1   0 from 2 to 4, 1 from 4 to 6, 2 from 20 to 22
    device 1      F0 5-6, r0, B0 7-10, F1 10-11, r1, B1 12-15, F2 23-24, r2, B2 25-28
    link 1 to 0   0 from 10 to 12, 1 from 15 to 17, 2 from 28 to 30
    """
    costs = Costs(
        forward=(2, 1),
        backward=(4, 3),
        recompute=1,
        latency=1,
        bandwidth=4,
        boundary_bytes=8,
        kept_bytes=(10, 20),
        backward_bytes=(5, 7),
        fixed_bytes=(100, 200),
    )
    simulation = simulate(schedules.one_f_one_b(2, 3), costs)
    timeline = simulation.timeline
    assert times(timeline, "backward", 0) == {0: (14, 18), 1: (21, 25), 2: (32, 36)}
    assert times(timeline, "backward", 1) == {0: (7, 10), 1: (12, 15), 2: (25, 28)}
    assert sorted((t.from_stage, t.start, t.end) for t in timeline.transfers) == [
        *((0, 2, 5), (0, 4, 7), (0, 20, 23)),
        *((1, 10, 13), (1, 15, 18), (1, 28, 31)),
    ]
    assert (timeline.step_time, timeline.busy) == (36, (21, 15))
    assert timeline.bubble == 1 / 2
    assert simulation.exposed_communication == 36 - 24
    first = (0, 110), (2, 120), (13, 125), (18, 120), (20, 125), (25, 110), (31, 115)
    second = (0, 200), (5, 220), (6, 227), (10, 220), (11, 227), (15, 200)
    assert simulation.memory == (
        (*first, (36, 100)),
        (*second, (23, 220), (24, 227), (28, 200)),
    )
    assert simulation.peak_bytes == (125, 227)
    # While device 0 waits for gradients 0 and 2, it may recompute: one second of each.
    early = dataclasses.replace(costs, recompute_when="early")
    assert simulate(schedules.one_f_one_b(2, 3), early).timeline.step_time == 34


def test_interleaving_with_transfers_is_that_worked_out_by_hand():
    """Forward 1, backward 2; each transfer takes its link 1, and a latency of 1.

    Stages 0 (a) and 2 (b) are on device 0, 1 (a) and 3 (b) on device 1:

    device 0  F0a 0, F1a 1, F0b 6, F1b 7, F2a 8, B0b 14, B1b 17, F2b 19, B0a 22, B1a 25,
              B2b 28, B2a 36-38
    device 1  F0a 3, F1a 4, F0b 9, B0b 10, F1b 12, B1b 13, F2a 15, B0a 18, B1a 21,
              F2b 23, B2b 24, B2a 32-34

    On the link from device 1, activation 2 waits for gradient 1, from 15 to 16; on that
    from device 0, for gradient 1, from 19 to 20.
    """
    plan = schedules.interleaved(4, 3, num_devices=2)
    costs = Costs(latency=1, bandwidth=4, boundary_bytes=4, kept_bytes=(1, 2, 4, 8))
    simulation = simulate(plan, costs)
    timeline = simulation.timeline
    starts = [
        {m: start for m, (start, _) in times(timeline, kind, k).items()}
        for kind in ("forward", "backward")
        for k in range(4)
    ]
    assert starts == [
        *({0: 0, 1: 1, 2: 8}, {0: 3, 1: 4, 2: 15}),
        *({0: 6, 1: 7, 2: 19}, {0: 9, 1: 12, 2: 23}),
        *({0: 22, 1: 25, 2: 36}, {0: 18, 1: 21, 2: 32}),
        *({0: 14, 1: 17, 2: 28}, {0: 10, 1: 13, 2: 24}),
    ]
    late = {(1, 2, 2): (16, 18), (2, 1, 1): (19, 21), (2, 3, 2): (20, 22)}
    found = {
        (t.from_stage, t.to_stage, t.microbatch): (t.start, t.end)
        for t in timeline.transfers
    }
    assert len(found) == 3 * 2 * 3
    assert found.items() >= late.items()
    assert (timeline.step_time, timeline.busy) == (38, (18, 18))
    assert timeline.bubble == pytest.approx(20 / 38)
    assert simulation.exposed_communication == 38 - 23
    # Forwards 0, 1 and 2 of stage 0 beside 0 and 1 of stage 2; 0 and 1 of stage 1
    # beside 0 of stage 3.
    assert simulation.peak_bytes == (3 * 1 + 2 * 4, 2 * 2 + 8)


def test_two_encoders_take_as_long_as_one_and_the_head():
    # encoder 0  F0 F1 F2 F3 .. B3---- B2---- B1---- B0----
    # encoder 1  F0 F1 F2 F3 .. B3---- B2---- B1---- B0----
    # head       .. F0 F1 F2 F3 B3---- B2---- B1---- B0----
    towers = schedules.DataFlow(((), (), (0, 1)))
    plan = schedules.gpipe(3, 4, flow=towers)
    # As a line of two: (M + 1) (f + b). One of three takes (M + 2) (f + b).
    assert step_time(plan) == (4 + 1) * 3
    assert step_time(schedules.gpipe(3, 4)) == (4 + 2) * 3
    assert step_time(schedules.one_f_one_b(3, 4, flow=towers)) == (4 + 1) * 3
    # Encoders of 5 and 2: the longer one is busy for M (5 + 10), and the head's forward
    # and backward of one microbatch come between.
    costs = Costs(forward=[5, 2, 1], backward=[10, 4, 2])
    assert simulate(plan, costs).timeline.step_time == 4 * 15 + 1 + 2


def test_each_reader_of_a_stage_has_a_transfer_of_its_own():
    flow = schedules.DataFlow(((), (0,), (0, 1)))
    costs = Costs(forward=1, backward=2, boundary_bytes=[6, 4], bandwidth=2)
    sent = simulate(schedules.gpipe(3, 1, flow=flow), costs).timeline.transfers
    # Forward of stage 0 at 0 to 1, of 1 at 4 to 5, of 2 at 7 to 8, backward to 10.
    assert [(x.from_stage, x.to_stage, x.start, x.end) for x in sent] == [
        (0, 1, 1, 4),
        (0, 2, 1, 4),
        (1, 2, 5, 7),
        (2, 0, 10, 13),
        (2, 1, 10, 12),
        (1, 0, 14, 17),
    ]


def test_latency_keeps_no_link_busy():
    timeline = simulate(schedules.gpipe(2, 2), Costs(latency=5)).timeline
    assert times(timeline, "forward", 1) == {0: (6, 7), 1: (7, 8)}
    assert timeline.step_time == 9 + 2 * 5


def test_a_link_is_shared_by_all_stages_of_its_devices():
    """Stages 0 and 2 on device 0, stage 1 on device 1; backward 1.

    Only between stages 1 and 2 there are bytes, which take the link 3:

    device 0      F0a 0-1, F1a 1-2, F0b 5-6, B0b 6-7, F1b 8-9, B1b 9-10, B0a, B1a
    link 1 to 0   activations 0 from 2 to 5, 1 (there at 3) from 5 to 8
    link 0 to 1   gradients 0 from 7 to 10, 1 from 10 to 13
    device 1      F0 1-2, F1 2-3, B0 10-11, B1 13-14
    """

    def both(m, *stages):
        kinds = ("forward", "backward")
        return [Action(kind, k, m) for k, kind in zip(stages, kinds, strict=True)]

    first = [Action("forward", 0, 0), Action("forward", 0, 1)]
    first += [*both(0, 2, 2), *both(1, 2, 2)]
    first += [Action("backward", 0, 0), Action("backward", 0, 1)]
    second = [Action(kind, 1, m) for kind in ("forward", "backward") for m in (0, 1)]
    plan = Schedule(3, 2, (tuple(first), tuple(second))).validate()
    costs = Costs(backward=1, bandwidth=1, boundary_bytes=(0, 3))
    timeline = simulate(plan, costs).timeline
    assert times(timeline, "forward", 2) == {0: (5, 6), 1: (8, 9)}
    assert times(timeline, "backward", 2) == {0: (6, 7), 1: (9, 10)}
    assert times(timeline, "backward", 1) == {0: (10, 11), 1: (13, 14)}
    assert times(timeline, "backward", 0) == {0: (11, 12), 1: (14, 15)}


def test_on_one_device_transfers_are_free():
    costs = {"latency": 7, "bandwidth": 1, "boundary_bytes": 99}
    timeline = simulate(schedules.gpipe(3, 2, num_devices=1), Costs(**costs)).timeline
    assert timeline.step_time == 3 * 2 * 3
    assert timeline.transfers == ()


@given(
    st.sampled_from(schedules.NAMES),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_exposed_communication_is_what_transfers_add(name, P, more, latency, size):
    plan = schedules.make(name, num_stages=P, num_microbatches=P + more)
    costs = Costs(latency=latency, bandwidth=2, boundary_bytes=size)
    simulation = simulate(plan, costs)
    added = simulation.timeline.step_time - step_time(plan)
    assert simulation.exposed_communication == added
    # At least there and back over all boundaries, of the longest path.
    assert added >= 2 * (P - 1) * (latency + size / 2)
    if latency == size == 0:
        assert added == 0


@given(st.integers(1, 6), st.integers(0, 6))
def test_kept_activations_are_those_in_flight(K, more):
    M = K + more
    costs = Costs(kept_bytes=10, fixed_bytes=1000)
    assert simulate(schedules.gpipe(K, M), costs).peak_bytes == (1000 + 10 * M,) * K
    assert simulate(schedules.one_f_one_b(K, M), costs).peak_bytes == tuple(
        1000 + 10 * (K - k) for k in range(K)
    )


def test_memory_over_time_is_that_worked_out_by_hand():
    # F0 0-1, F1 1-2, r1 2-3, B1 3-5, r0 5-6, B0 6-8
    costs = Costs(recompute=1, kept_bytes=1, backward_bytes=10, fixed_bytes=100)
    simulation = simulate(schedules.gpipe(1, 2), costs)
    assert simulation.memory == (((0, 101), (1, 102), (2, 112), (5, 111), (8, 100)),)
    assert simulation.peak_bytes == (112,)
    assert simulation.fixed_bytes == (100,)


def test_a_split_backward_holds_its_activations_to_the_later_half():
    # F0 F1 .. B0 W0 B1 W1 beside .. F0 B0 F1 B1 W0 W1
    costs = Costs(kept_bytes=1, backward_bytes=10)
    assert simulate(schedules.find("zero_bubble")(2, 2), costs).peak_bytes == (12, 22)


def test_stages_of_a_device_share_its_memory():
    costs = Costs(kept_bytes=(1, 2, 4, 8), fixed_bytes=(100, 200, 300, 400))
    simulation = simulate(schedules.gpipe(4, 3, num_devices=2), costs)
    assert simulation.fixed_bytes == (400, 600)
    assert simulation.peak_bytes == (400 + 3 * (1 + 4), 600 + 3 * (2 + 8))


@given(
    st.sampled_from(schedules.NAMES), st.integers(1, 4), st.integers(0, 5), st.data()
)
def test_a_simulated_step_gives_back_its_costs(name, K, more, data):
    plan = schedules.make(name, num_stages=K, num_microbatches=K + more)
    each = st.tuples(*[st.integers(1, 9)] * K)
    forward, first, second, again = (data.draw(each) for _ in range(4))
    costs = Costs(
        forward=forward,
        backward=tuple(a + b for a, b in zip(first, second, strict=True)),
        backward_input=first,
        backward_weight=second,
        recompute=again,
    )
    timeline = simulate(plan, costs).timeline
    found = costs_of(timeline)
    for kind in timeline.span_kinds():
        for k in range(K):
            assert kind.seconds(found, k) == pytest.approx(kind.seconds(costs, k))
    assert simulate(plan, found).timeline.step_time == pytest.approx(timeline.step_time)


def test_costs_of_one_schedule_predict_another():
    halves = {"backward_input": (1, 2), "backward_weight": (3, 4)}
    split = simulate(schedules.find("zero_bubble")(2, 3), Costs(**halves)).timeline
    assert costs_of(split).backward == (4, 6)
    whole = simulate(schedules.gpipe(2, 3), Costs(backward=(4, 6))).timeline
    assert costs_of(whole).seconds("backward_weight", 1) == 3
    both = simulate(schedules.one_f_one_b(2, 3), costs_of(split)).timeline
    assert both.step_time == step_time(schedules.one_f_one_b(2, 3), backward=(4, 6))


def test_recomputation_of_some_microbatches_counts_for_all():
    timeline = simulate(schedules.gpipe(1, 4), Costs(recompute=2)).timeline
    kept = [
        s for s in timeline.spans if (s.kind.name, s.microbatch) != ("recompute", 3)
    ]
    some = dataclasses.replace(timeline, spans=tuple(kept))
    assert costs_of(some).recompute == (1.5,)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_costs_of_half_a_step_are_refused(kind):
    spans = (Span(kind, 0, 0, 0, 0.0, 1.0),)
    words = "without a forward or a whole backward of stage 0. Measure a step"
    with pytest.raises(ValueError, match=words):
        costs_of(Timeline(schedules.gpipe(1, 1), spans))


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"forward": -1}, "`forward` holds finite numbers of at least 0. Received "),
        ({"backward": (1, -2)}, "Received backward=(1, -2). Use 0 for what is free."),
        ({"recompute": math.nan}, "Received recompute=nan."),
        ({"latency": -0.5}, "Received latency=-0.5."),
        ({"kept_bytes": math.inf}, "Received kept_bytes=inf."),
        ({"bandwidth": 0}, "a second above 0. Received bandwidth=0. Leave it out"),
        ({"bandwidth": math.nan}, "Received bandwidth=nan."),
        ({"bandwidth": "fast"}, "Received bandwidth='fast'."),
        ({"forward": "12"}, "Received forward='12'."),
        (
            {"backward_input": 1},
            "given together. Received backward_input=1 and backward_weight=None. Give",
        ),
    ],
)
def test_costs_that_cannot_be_are_refused(costs, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Costs(**costs)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (
            {"forward": (1, 2)},
            "`forward` is one number, or one for each stage: 3 here. Received 2: "
            "forward=(1, 2).",
        ),
        ({"fixed_bytes": [1] * 4}, "one for each stage: 3 here. Received 4:"),
        (
            {"boundary_bytes": (1, 2, 3)},
            "one for each boundary between stages: 2 here. Received 3:",
        ),
    ],
)
def test_costs_of_other_stages_are_refused(costs, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        simulate(schedules.gpipe(3, 2), Costs(**costs))


def test_one_stage_has_no_boundary():
    assert step_time(schedules.gpipe(1, 2), boundary_bytes=(), bandwidth=1) == 6


def test_a_deadlock_is_named():
    plan = schedules.gpipe(2, 1)
    broken = dataclasses.replace(plan, orders=(plan.orders[0][::-1], plan.orders[1]))
    with pytest.raises(ValueError, match="The schedule deadlocks"):
        simulate(broken, Costs())


def test_text_adds_memory_and_communication():
    costs = Costs(
        forward=1e-3,
        backward=2e-3,
        latency=5e-4,
        kept_bytes=2**20,
        fixed_bytes=(0, 9e6),
    )
    lines = str(simulate(schedules.gpipe(2, 4), costs)).splitlines()
    assert lines[0] == "gpipe, simulated"
    assert lines[-2].startswith("step time 16.00 ms, bubble 25.0%, efficiency 75.0%")
    assert lines[-1] == (
        "exposed communication 1.00 ms, most memory 12.6 MiB, on device 1"
    )
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpipe", Costs()), "`schedule` must be a Schedule. Received 'gpipe'"),
        ((schedules.gpipe(2, 2), 5), "`costs` must be a Costs. Received 5"),
    ],
)
def test_arguments_of_another_type_are_named(arguments, words):
    with pytest.raises(TypeError, match=words):
        simulate(*arguments)


def offloaded(host_bandwidth):
    """Returns a step of one device: F0 F1 O0 F2 O1 F3 B3 R1 B2 R0 B1 B0."""
    plan = schedules.Offload(schedules.gpipe, most_held=2)(1, 4)
    return simulate(plan, Costs(kept_bytes=10, host_bandwidth=host_bandwidth))


def test_copies_to_the_host_go_beside_the_passes():
    found = offloaded(10)
    timeline = found.timeline
    assert times(timeline, "forward", 0) == {0: (0, 1), 1: (1, 2), 2: (2, 3), 3: (3, 4)}
    assert times(timeline, "offload", 0) == {0: (1, 2), 1: (2, 3)}
    assert times(timeline, "reload", 0) == {1: (6, 7), 0: (8, 9)}
    backwards = {3: (4, 6), 2: (6, 8), 1: (8, 10), 0: (10, 12)}
    assert times(timeline, "backward", 0) == backwards
    assert timeline.busy == (12,)
    assert timeline.bubble == 0
    assert timeline.efficiency == 1
    (memory,) = found.memory
    assert dict(memory) == {
        0: 10,
        1: 20,
        2: 20,
        3: 20,
        4: 20,
        6: 20,
        8: 20,
        10: 10,
        12: 0,
    }
    (held,) = timeline.in_flight()
    assert all(dict(memory)[t] == 10 * n for t, n in held)


def test_what_waits_for_slow_copies_is_counted_as_bubble():
    """One after the other, they hold forwards up, then backwards."""
    timeline = offloaded(2.5).timeline
    assert times(timeline, "offload", 0) == {0: (1, 5), 1: (5, 9)}
    assert times(timeline, "forward", 0)[2] == (5, 6)
    assert times(timeline, "forward", 0)[3] == (9, 10)
    assert times(timeline, "reload", 0) == {1: (12, 16), 0: (16, 20)}
    backwards = {3: (10, 12), 2: (12, 14), 1: (16, 18), 0: (20, 22)}
    assert times(timeline, "backward", 0) == backwards
    assert timeline.bubble == pytest.approx(10 / 22)


@pytest.mark.parametrize("name", schedules.NAMES)
def test_copies_that_take_no_time_change_nothing_but_memory(name):
    costs = Costs(kept_bytes=1, recompute=1)
    policy = schedules.find(name)
    plans = [policy.on(policy.deal(8, 4), 12) if policy.deals_stages else policy(8, 12)]
    plans.append(schedules.Offload(policy).insert(plans[0]))
    plain, moved = (simulate(plan, costs) for plan in plans)
    assert moved.timeline.step_time == plain.timeline.step_time
    passes = [s for s in moved.timeline.spans if not s.kind.is_copy]
    assert set(passes) == set(plain.timeline.spans)
    assert sum(moved.peak_bytes) < sum(plain.peak_bytes)
    assert moved.peak_bytes == moved.timeline.schedule.most_held([1] * 8)


def test_a_copy_is_not_in_the_row_of_its_device():
    text = str(offloaded(2.5).timeline)
    row = text.splitlines()[1]
    assert "O" not in row
    assert "R" not in row
    assert "O to host, R from host" in text
