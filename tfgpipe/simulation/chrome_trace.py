"""Timelines as Chrome trace events, which Perfetto opens.

Written with `json.dump`, they open at https://ui.perfetto.dev.
"""

from __future__ import annotations

from typing import Any

from tfgpipe.simulation.timeline import Timeline, span_labels


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """Returns a timeline in the Chrome trace event format.

    There is a row for each device, and one for each pair of stages between which
    something is sent.

    Args:
        timeline: The step. Its first span is at time 0 of the trace.
    """

    def microseconds(seconds: float) -> float:
        return 1e6 * (seconds - timeline.start)

    events: list[dict[str, Any]] = []

    def add(phase: str, name: str, **fields: Any) -> None:
        events.append({"pid": 0, "ph": phase, "name": name, **fields})

    name = timeline.title or timeline.schedule.name
    add("M", "process_name", args={"name": name})
    for p in range(timeline.schedule.num_devices):
        add("M", "thread_name", tid=p, args={"name": f"device {p}"})
        add("M", "thread_sort_index", tid=p, args={"sort_index": p})
    for span, label in span_labels(timeline).items():
        add(
            "X",
            label,
            tid=span.device,
            cat=span.kind.name,
            ts=microseconds(span.start),
            dur=1e6 * span.duration,
            args={"stage": span.stage, "microbatch": span.microbatch},
        )
    for i, transfer in enumerate(timeline.transfers):
        # Asynchronous events: several transfers can run at a time.
        name = f"stage {transfer.from_stage} to {transfer.to_stage}"
        ids = {"id": i, "cat": "transfer"}
        args = {"microbatch": transfer.microbatch}
        add("b", name, **ids, ts=microseconds(transfer.start), args=args)
        add("e", name, **ids, ts=microseconds(transfer.end))
    return {"traceEvents": events, "displayTimeUnit": "ms"}
