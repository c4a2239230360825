"""Small helpers that know nothing of pipelines: text tables, sizes, argument checks."""

from tfgpipe._util import argument_checks, choices, docstrings
from tfgpipe._util.choices import Choice
from tfgpipe._util.command_line import CommandParser
from tfgpipe._util.crash_report import report_crash
from tfgpipe._util.identity_map import IdentityMap, unique
from tfgpipe._util.lazy import lazy_exports
from tfgpipe._util.sizes import num_bytes
from tfgpipe._util.spans import stage_spans
from tfgpipe._util.text import (
    first_names,
    layer_names,
    readable_bytes,
    readable_count,
    text_table,
)
