"""Private TensorFlow API: what has run, from its graphs and its profiler's traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorflow.python.eager import context
from tensorflow.tsl.profiler.protobuf import xplane_pb2


def partition_graphs(run: Callable[[], object]) -> list[Any]:
    """Returns the graphs that devices run, one for each device and function.

    TensorFlow gives those of functions that run for the first time, as they are after
    its placer, Grappler and its partitioning: each node names the device it is on, and
    `_Send` what is copied from one to another.

    Returns:
        `GraphDef`s.
    """
    current = context.context()
    context.enable_run_metadata()
    try:
        current.export_run_metadata()  # What was collected before goes.
        run()
        metadata = current.export_run_metadata()
    finally:
        context.disable_run_metadata()
    return [g for f in metadata.function_graphs for g in f.partition_graphs]


@dataclasses.dataclass(frozen=True)
class ProfiledEvent:
    """An event on a device.

    Attributes:
        device: The device, such as `/device:GPU:0`, or `/host:CPU`.
        line: The stream or thread, such as `Stream #14(MemcpyD2D)`.
        name: The kernel, copy or operation.
        start: Its start, in seconds.
        end: Its end, in seconds.
    """

    device: str
    line: str
    name: str
    start: float
    end: float


def profiled_events(folder: Path) -> list[ProfiledEvent]:
    """Returns the events of a trace of `tf.profiler.experimental`."""
    return [
        ProfiledEvent(
            device=plane.name,
            line=line.name,
            name=plane.event_metadata[event.metadata_id].name,
            start=1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps,
            end=1e-9 * line.timestamp_ns
            + 1e-12 * (event.offset_ps + event.duration_ps),
        )
        for path in sorted(folder.rglob("*.xplane.pb"))
        for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes
        for line in plane.lines
        for event in line.events
    ]
