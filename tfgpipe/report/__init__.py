"""Reports of a pipeline: stage tables, memory per device, plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.report.memory import draw_memory as draw_memory
    from tfgpipe.report.plots import SERIES as SERIES
    from tfgpipe.report.plots import plot_bubbles as plot_bubbles
    from tfgpipe.report.plots import plot_differences as plot_differences
    from tfgpipe.report.plots import plot_gpipe_bubbles as plot_gpipe_bubbles
    from tfgpipe.report.plots import plot_memory as plot_memory
    from tfgpipe.report.plots import plot_memory_parts as plot_memory_parts
    from tfgpipe.report.plots import plot_mesh as plot_mesh
    from tfgpipe.report.plots import plot_peaks as plot_peaks
    from tfgpipe.report.plots import plot_schedule as plot_schedule
    from tfgpipe.report.plots import plot_timelines as plot_timelines
    from tfgpipe.report.plots import supported_formats as supported_formats
    from tfgpipe.report.summary import print_summary as print_summary
    from tfgpipe.report.tables import device_memory as device_memory
    from tfgpipe.report.tables import stage_table as stage_table

__all__, __getattr__, __dir__ = lazy_exports(__name__)
