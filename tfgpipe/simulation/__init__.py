"""Simulated and measured timelines of a pipeline step."""

from tfgpipe.simulation.auto_schedule import AutoSchedule, ScheduleName, find_schedule
from tfgpipe.simulation.chrome_trace import trace_events
from tfgpipe.simulation.search import BestSchedule, best_schedule
from tfgpipe.simulation.simulator import Costs, Simulation, costs_of, simulate
from tfgpipe.simulation.timeline import (
    Span,
    Timeline,
    average_timelines,
    describe_schedule,
    imbalance,
    timeline_metrics,
)
