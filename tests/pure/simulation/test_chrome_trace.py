"""The trace file, against a timeline worked out by hand."""

from __future__ import annotations

import dataclasses
import json

from tests.pure.simulation.test_timeline import BY_HAND
from tfgpipe.simulation.chrome_trace import trace_events


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
