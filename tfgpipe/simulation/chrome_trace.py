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

    shared = {"pid": 0}
    name = timeline.title or timeline.schedule.name
    events: list[dict[str, Any]] = [
        {**shared, "ph": "M", "name": "process_name", "args": {"name": name}}
    ]
    for device in range(timeline.schedule.num_devices):
        row = {**shared, "tid": device, "ph": "M"}
        title = {"name": f"device {device}"}
        events.append({**row, "name": "thread_name", "args": title})
        events.append(
            {**row, "name": "thread_sort_index", "args": {"sort_index": device}}
        )
    labels = span_labels(timeline)
    for span in timeline.spans:
        events.append(
            {
                **shared,
                "tid": span.device,
                "ph": "X",
                "name": labels[span],
                "cat": span.kind,
                "ts": microseconds(span.start),
                "dur": 1e6 * span.duration,
                "args": {"stage": span.stage, "microbatch": span.microbatch},
            }
        )
    for number, transfer in enumerate(timeline.transfers):
        # Of an asynchronous kind: several can be on their way at a time.
        both = {
            **shared,
            "id": number,
            "name": f"stage {transfer.from_stage} to {transfer.to_stage}",
            "cat": "transfer",
        }
        args = {"microbatch": transfer.microbatch}
        start, end = microseconds(transfer.start), microseconds(transfer.end)
        events.append({**both, "ph": "b", "ts": start, "args": args})
        events.append({**both, "ph": "e", "ts": end})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
