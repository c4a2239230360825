"""Simulated and measured timelines of a pipeline step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.simulation.chrome_trace import trace_events as trace_events
    from tfgpipe.simulation.simulator import Costs as Costs
    from tfgpipe.simulation.simulator import Simulation as Simulation
    from tfgpipe.simulation.simulator import costs_of as costs_of
    from tfgpipe.simulation.simulator import simulate as simulate
    from tfgpipe.simulation.timeline import Span as Span
    from tfgpipe.simulation.timeline import Timeline as Timeline
    from tfgpipe.simulation.timeline import average_timelines as average_timelines
    from tfgpipe.simulation.timeline import describe_schedule as describe_schedule
    from tfgpipe.simulation.timeline import imbalance as imbalance
    from tfgpipe.simulation.timeline import timeline_metrics as timeline_metrics

__all__, __getattr__, __dir__ = lazy_exports(__name__)
