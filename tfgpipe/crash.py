"""An error that a program did not expect: a sentence, and a file with the traceback."""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path


def report(error: Exception, *, argv: Sequence[str], folder: Path | None = None) -> str:
    """Writes the traceback of an error to a file, and returns a sentence about it.

    Args:
        error: The error.
        argv: The command line that it came of, which is written as well.
        folder: Where to write `crash-*.log`; where that is not possible, and by
            default, it is the system's folder for temporary files.
    """
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {first.strip()}" if first else type(error).__name__
    trace = "".join(traceback.format_exception(error))
    now = datetime.datetime.now()
    name = f"crash-{now:%Y%m%d-%H%M%S}-{os.getpid()}.log"
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
