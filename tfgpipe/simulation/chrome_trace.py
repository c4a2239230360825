"""Timelines as Chrome trace events, which Perfetto opens.

Written with `json.dump`, they open at https://ui.perfetto.dev.
"""

from __future__ import annotations

from typing import Any

from tfgpipe.simulation.timeline import Timeline, span_labels


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """Returns a timeline in the Chrome trace event format.

    There is a row for each device, one for its copies to the host and back, and one for
    each pair of stages between which something is sent.

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
    P = timeline.schedule.num_devices
    rows = {p: f"device {p}" for p in range(P)}
    copies = (span.device for span in timeline.spans if span.kind.is_copy)
    rows.update((p + P, f"device {p} and host") for p in copies)
    for tid, row in rows.items():
        place = 2 * (tid % P) + tid // P
        add("M", "thread_name", tid=tid, args={"name": row})
        add("M", "thread_sort_index", tid=tid, args={"sort_index": place})
    for span, label in span_labels(timeline).items():
        add(
            "X",
            label,
            tid=span.device + P * span.kind.is_copy,
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
