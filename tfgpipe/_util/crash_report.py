"""Crash reports: an unexpected error as one sentence, with its traceback in a file."""

from __future__ import annotations

import datetime
import os
import re
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path

# Lines of TensorFlow's and Keras' messages that say where, not what, was wrong.
_LOCATION_LINES = re.compile(
    r"\s|Graph execution error|\d+ root error|Detected at node|<stack traces|In call "
    r"|Exception encountered when calling "
)


def report_crash(
    error: BaseException, *, argv: Sequence[str], folder: Path | None = None
) -> str:
    """Writes the traceback of an error to a file, and returns a sentence about it.

    Args:
        error: The error.
        argv: The command line, which is written as well.
        folder: The folder of `crash-*.log`; if None or not writable, the system's
            folder for temporary files.
    """
    described = traceback.TracebackException.from_exception(error)
    # Its text is there even where `str(error)` raises.
    kind, words = type(error).__name__, _message_line(str(described))
    said = f"{kind}: {words}" if words else kind
    trace = "".join(described.format())
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
    r"""Returns the first line of a message that says what was wrong.

    >>> _message_line("{{function_node f}} OOM when allocating tensor [Op:MatMul]")
    'OOM when allocating tensor [Op:MatMul]'

    >>> keras = "Exception encountered when calling A.call().\n\n\x1b[1mNo.\x1b[0m"
    >>> _message_line(keras)
    'No.'

    >>> traced = 'in user code:\n\n    File "a.py", line 1, in f  *\n        x\n    No.'
    >>> _message_line(traced)
    'No.'

    TensorFlow and Keras have others before that, which say where.
    """
    if text.startswith("in user code:"):  # Of a function that TensorFlow has traced.
        text = re.sub('(?m)^File ".*', "", textwrap.dedent(text.partition("\n")[2]))
    # Keras prints what was wrong in bold.
    lines = (
        # Of several errors each has a number, and its kind.
        re.sub(r"^(\{\{.*?\}\}| *\(\d+\) [A-Z_]+:) *|\x1b\[\d*m", "", line)
        for line in text.splitlines()
    )
    return next(
        (line.strip() for line in lines if line and not _LOCATION_LINES.match(line)), ""
    )
