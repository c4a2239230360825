"""Small helpers that know nothing of pipelines: text tables, sizes, argument checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util.lazy import lazy_exports as lazy_exports

if TYPE_CHECKING:
    from tfgpipe._util import argument_checks as argument_checks
    from tfgpipe._util.command_line import CommandParser as CommandParser
    from tfgpipe._util.crash_report import report_crash as report_crash
    from tfgpipe._util.identity_map import IdentityMap as IdentityMap
    from tfgpipe._util.identity_map import unique as unique
    from tfgpipe._util.sizes import num_bytes as num_bytes
    from tfgpipe._util.spans import stage_spans as stage_spans
    from tfgpipe._util.text import layer_names as layer_names
    from tfgpipe._util.text import readable_bytes as readable_bytes
    from tfgpipe._util.text import readable_count as readable_count
    from tfgpipe._util.text import some_of as some_of
    from tfgpipe._util.text import text_table as text_table

__all__, __getattr__, __dir__ = lazy_exports(__name__)
