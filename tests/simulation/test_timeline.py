"""Numbers and drawings of timelines, against examples worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.timelines import BY_HAND
from tfgpipe import schedules
from tfgpipe.simulation.simulator import Costs, simulate
from tfgpipe.simulation.timeline import (
    Span,
    Timeline,
    TransferSpan,
    average_timelines,
    span_labels,
    time_series,
    timeline_metrics,
)

pytestmark = pytest.mark.pure


def shifted(timeline, seconds):
    return dataclasses.replace(
        timeline,
        spans=tuple(
            dataclasses.replace(s, start=s.start + seconds, end=s.end + seconds)
            for s in timeline.spans
        ),
        transfers=tuple(
            dataclasses.replace(t, start=t.start + seconds, end=t.end + seconds)
            for t in timeline.transfers
        ),
    )


def simulated(plan, **costs):
    return simulate(plan, Costs(**costs)).timeline


def test_the_numbers_are_those_worked_out_by_hand():
    assert (BY_HAND.start, BY_HAND.end, BY_HAND.step_time) == (10, 19, 9)
    assert BY_HAND.busy == (4, 5)
    assert BY_HAND.utilisation == (4 / 9, 5 / 9)
    assert BY_HAND.bubble == pytest.approx(1 / 2)
    assert BY_HAND.efficiency == pytest.approx(7 / 18)
    assert BY_HAND.imbalance == pytest.approx(5 / 4.5)


def test_the_order_of_spans_does_not_matter():
    backwards = dataclasses.replace(BY_HAND, spans=BY_HAND.spans[::-1])
    assert timeline_metrics(backwards) == timeline_metrics(BY_HAND)
    assert backwards.in_flight() == BY_HAND.in_flight()
    assert str(backwards) == str(BY_HAND)


def test_a_microbatch_is_in_flight_from_its_forward_to_its_backward():
    assert BY_HAND.in_flight() == (
        ((10, 1), (19, 0)),
        ((10, 0), (11, 1), (16, 0)),
    )
    assert BY_HAND.peak_in_flight == (1, 1)


def test_a_split_backward_ends_with_its_later_half():
    timeline = simulated(schedules.find("zero_bubble")(2, 2), forward=1, backward=2)
    # F0 F1 .. B0 W0 B1 W1 beside .. F0 B0 F1 B1 W0 W1
    assert timeline.in_flight() == (
        ((0, 1), (1, 2), (5, 1), (7, 0)),
        ((0, 0), (1, 1), (3, 2), (6, 1), (7, 0)),
    )


def test_stages_of_one_device_count_each():
    timeline = simulated(schedules.gpipe(2, 2, num_devices=1))
    assert timeline.peak_in_flight == (4,)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_the_most_in_flight_is_that_of_the_schedule(num_devices):
    P = num_devices
    assert simulated(schedules.gpipe(P, 8)).peak_in_flight == (8,) * P
    assert simulated(schedules.one_f_one_b(P, 8)).peak_in_flight == tuple(
        range(P, 0, -1)
    )


def test_what_ends_as_something_starts_makes_room():
    changes = [(2, 3), (1, 5), (2, -5)]
    assert time_series(changes, start=0, base=7) == ((0, 7), (1, 12), (2, 10))


@given(
    st.sampled_from(schedules.NAMES),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(0, 3),
)
def test_shares_add_up(name, num_devices, more, recompute):
    plan = schedules.make(
        name, num_stages=num_devices, num_microbatches=num_devices + more
    )
    timeline = simulated(plan, recompute=recompute)
    mean = sum(timeline.utilisation) / num_devices
    assert timeline.bubble == pytest.approx(1 - mean)
    # Of a forward, a backward of two and the recomputation, the first are of use.
    useful = mean * 3 / (3 + recompute)
    assert timeline.efficiency == pytest.approx(useful)
    assert timeline.imbalance == pytest.approx(1)


def test_text_draws_each_device_to_scale():
    title, first, second, legend, numbers = str(BY_HAND).splitlines()
    assert title == "by hand"
    assert re.fullmatch(r"device 0  F0-+\.+r0-+B0-+  44\.4%", first)
    assert re.fullmatch(r"device 1  \.+F0-+r0-+B0-+\.+  55\.6%", second)
    columns = len(first) - len("device 0  ") - len("  44.4%")
    assert first.count(".") - 1 == round(columns * 5 / 9)
    assert legend.startswith("F forward, r recompute, B backward, . idle;")
    assert numbers == (
        "step time 9,000.00 ms, bubble 50.0%, efficiency 38.9%, imbalance 1.11"
    )


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize(("P", "M"), [(1, 1), (4, 8), (8, 32), (12, 100)])
def test_text_fits_a_terminal(name, P, M):
    v = 2 if name == "interleaved" else 1
    plan = schedules.make(name, num_stages=v * P, num_microbatches=M, num_devices=P)
    lines = str(simulated(plan, recompute=1)).splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if line.startswith("device ")]
    assert len(rows) == P
    assert {len(row) for row in rows} == {100}


def test_a_box_too_narrow_for_its_number_shows_its_letter():
    rows = str(simulated(schedules.one_f_one_b(8, 32))).splitlines()[1:9]
    assert set("".join(row[10:-7] for row in rows)) <= set("FB-.0123456789")
    assert "FFFFF" in rows[0]
    # Half a number would be another one.
    numbers = {int(n) for row in rows for n in re.findall(r"[FB](\d+)", row[:-7])}
    assert max(numbers) <= 31
    for row in rows:
        drawn = [int(n) for n in re.findall(r"B(\d+)", row[:-7])]
        assert drawn == sorted(drawn)


def test_labels_name_kind_microbatch_and_which_stage_of_the_device():
    labels = span_labels(BY_HAND)
    named = [labels[span] for span in BY_HAND.spans]
    assert named == ["F0", "F0", "r0", "B0", "r0", "B0"]
    timeline = simulated(schedules.interleaved(4, 2, num_devices=2), recompute=1)
    labels = span_labels(timeline)
    again = [s for s in timeline.spans if s.kind.name == "recompute" and s.stage == 3]
    assert [labels[span] for span in again] == ["r0b", "r1b"]


def test_the_mean_of_steps_is_the_mean_of_their_times():
    slower = dataclasses.replace(
        BY_HAND,
        spans=(
            *BY_HAND.spans[:-1],
            dataclasses.replace(BY_HAND.spans[-1], start=18.0, end=22.0),
        ),
    )
    # Clocks of steps begin at 0, so that when they were made does not matter.
    mean = average_timelines([BY_HAND, shifted(slower, 1000.0)])
    assert mean.schedule == BY_HAND.schedule
    assert mean.title == "by hand"
    times = {(s.kind.name, s.stage): (s.start, s.end) for s in mean.spans}
    assert times == {
        ("forward", 0): (0, 1),
        ("forward", 1): (1, 2),
        ("recompute", 1): (2, 3),
        ("backward", 1): (3, 6),
        ("recompute", 0): (6, 7),
        ("backward", 0): (7.5, 10.5),
    }
    assert mean.transfers == (
        TransferSpan(0, 1, 0, 0.75, 1),
        TransferSpan(1, 0, 0, 5.5, 6),
    )


def test_the_mean_of_one_step_is_that_step():
    assert average_timelines([BY_HAND]) == shifted(BY_HAND, -10.0)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (None, "needs at least one timeline. Received none"),
        (
            simulated(schedules.gpipe(2, 2)),
            "schedules that differ: gpipe, 2 stages on 2 devices, 1 microbatches; "
            "gpipe, 2 stages on 2 devices, 2 microbatches. Average",
        ),
        (
            dataclasses.replace(BY_HAND, spans=BY_HAND.spans[:-1]),
            "Received 1 times in 2 timelines: Span(kind='backward', stage=0",
        ),
        (
            dataclasses.replace(BY_HAND, transfers=BY_HAND.transfers[:1]),
            "Received 1 times in 2 timelines: TransferSpan(from_stage=1, to_stage=0",
        ),
    ],
)
def test_steps_without_a_mean_are_refused(others, words):
    timelines = [] if others is None else [BY_HAND, others]
    with pytest.raises(ValueError, match=re.escape(words)):
        average_timelines(timelines)


@pytest.mark.parametrize("spans", [(), (Span("forward", 0, 0, 0, 1.0, 1.0),)])
def test_a_timeline_without_time_is_refused(spans):
    words = f"Received {len(spans)} spans that take none together. Measure a step"
    with pytest.raises(ValueError, match=words):
        Timeline(schedules.gpipe(2, 1), spans)


def test_a_report_is_json():
    assert json.loads(json.dumps(timeline_metrics(BY_HAND))) == {
        "schedule": "gpipe",
        "num_stages": 2,
        "num_microbatches": 1,
        "num_devices": 2,
        "step_time_seconds": 9,
        "bubble": pytest.approx(0.5),
        "efficiency": pytest.approx(7 / 18),
        "imbalance": pytest.approx(10 / 9),
        "utilisation": [4 / 9, 5 / 9],
        "busy_seconds": [4, 5],
        "peak_live": [1, 1],
    }


def test_a_microbatch_without_a_backward_is_held_until_its_last_span():
    spans = tuple(Span("forward", 0, m, 0, float(m), m + 1.0) for m in range(2))
    timeline = Timeline(schedules.gpipe(1, 2), spans)
    assert timeline.in_flight() == (((0.0, 1), (1.0, 1), (2.0, 0)),)
