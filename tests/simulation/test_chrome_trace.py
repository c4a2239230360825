"""The trace file, against a timeline worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.helpers.timelines import BY_HAND
from tfgpipe import schedules
from tfgpipe.simulation.chrome_trace import trace_events
from tfgpipe.simulation.simulator import Costs, simulate

pytestmark = pytest.mark.pure


def test_a_trace_holds_every_span_and_transfer():
    trace = json.loads(json.dumps(trace_events(BY_HAND)))
    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(BY_HAND.spans)
    assert spans[3] == {
        "pid": 0,
        "tid": 1,
        "ph": "X",
        "name": "B0",
        "cat": "backward",
        "ts": 3e6,
        "dur": 3e6,
        "args": {"stage": 1, "microbatch": 0},
    }
    begun = [e["ts"] for e in events if e["ph"] == "b" and e["cat"] == "transfer"]
    ended = [e["ts"] for e in events if e["ph"] == "e" and e["cat"] == "transfer"]
    assert begun == [0.75e6, 5.5e6]
    assert ended == [1e6, 6e6]


def test_a_trace_names_its_rows():
    events = trace_events(BY_HAND)["traceEvents"]
    names = {
        (event["name"], event.get("tid")): event["args"]
        for event in events
        if event["ph"] == "M"
    }
    assert names["process_name", None] == {"name": "by hand"}
    assert names["thread_name", 0] == {"name": "device 0"}
    assert names["thread_name", 1] == {"name": "device 1"}
    untitled = trace_events(dataclasses.replace(BY_HAND, title=""))["traceEvents"]
    assert untitled[0]["args"] == {"name": "gpipe"}


def test_copies_to_the_host_have_a_row_beside_that_of_their_device():
    plan = schedules.Offload(schedules.gpipe, most_held=2)(1, 4)
    timeline = simulate(plan, Costs(kept_bytes=1, host_bandwidth=1)).timeline
    events = trace_events(timeline)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "device 0", 1: "device 0 and host"}
    rows = {e["cat"]: e["tid"] for e in events if e["ph"] == "X"}
    assert rows == {"forward": 0, "backward": 0, "offload": 1, "reload": 1}
