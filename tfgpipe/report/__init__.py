"""Reports of a pipeline: stage tables, memory per device, plots."""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports
from tfgpipe.report.memory import draw_memory
from tfgpipe.report.plots import (
    SERIES,
    plot_bubbles,
    plot_differences,
    plot_gpipe_bubbles,
    plot_memory,
    plot_memory_parts,
    plot_mesh,
    plot_peaks,
    plot_schedule,
    plot_timelines,
    supported_formats,
)

if TYPE_CHECKING:
    from tfgpipe.report.summary import print_summary
    from tfgpipe.report.tables import device_memory, stage_table

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    summary="print_summary",
    tables="device_memory stage_table",
)
