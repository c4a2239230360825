"""Crash reports: an unexpected error as one sentence, with its traceback in a file."""

from __future__ import annotations

import datetime
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

# Lines of TensorFlow's messages that are no words about what was wrong.
_LOCATION_LINES = re.compile(
    r"\s|Graph execution error|Detected at node|<stack traces|In call "
)


def report_crash(
    error: Exception, *, argv: Sequence[str], folder: Path | None = None
) -> str:
    """Writes the traceback of an error to a file, and returns a sentence about it.

    Args:
        error: The error.
        argv: The command line that it came of, which is written as well.
        folder: Where to write `crash-*.log`; where that is not possible, and by
            default, it is the system's folder for temporary files.
    """
    kind, words = type(error).__name__, _message_line(str(error))
    said = f"{kind}: {words}" if words else kind
    trace = "".join(traceback.format_exception(error))
    now = datetime.datetime.now()
    name = f"crash-{now:%Y%m%d-%H%M%S-%f}-{os.getpid()}.log"
    for place in (folder, Path(tempfile.gettempdir())):
        if place is None or not place.is_dir():
            continue
        path = place / name
        try:
            text = f"{now:%Y-%m-%d %H:%M:%S}  {' '.join(argv)}\n\n{trace}"
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:
            continue
        return f"Crashed: {said}\nThe traceback is in {path}."
    sys.stderr.write(trace)
    return f"Crashed: {said}"


def _message_line(text: str) -> str:
    """Returns the first line of a message that says what was wrong.

    >>> _message_line("{{function_node f}} OOM when allocating tensor [Op:MatMul]")
    'OOM when allocating tensor [Op:MatMul]'

    TensorFlow has others before that, which say where.
    """
    lines = (re.sub(r"^\{\{.*?\}\} *", "", line) for line in text.splitlines())
    return next(
        (line.strip() for line in lines if line and not _LOCATION_LINES.match(line)), ""
    )
