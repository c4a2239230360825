"""Where operations ran, from the graphs that each device did."""

from __future__ import annotations

import re
from collections.abc import Callable

from tensorflow.python.eager import context


def graphs_of(run: Callable[[], object]) -> list:
    """Returns the graph that each device runs the first time that `run` does."""
    context.enable_run_metadata()
    context.context().export_run_metadata()  # What was collected before goes.
    try:
        run()
        metadata = context.context().export_run_metadata()
    finally:
        context.disable_run_metadata()
    return [g for f in metadata.function_graphs for g in f.partition_graphs]


def device_of(name: str) -> int | None:
    match = re.search(r"CPU:(\d+)$", name)
    return int(match[1]) if match else None
