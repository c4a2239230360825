"""Errors between hosts, and exit codes that ask for a restart."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

# Exit code of a temporary failure, as in sysexits.h: the same command goes on.
EX_TEMPFAIL = 75
# Exit code after a request to stop, with all saved: the same command goes on.
EXIT_PREEMPTED = 42


class ClusterError(RuntimeError):
    """The workers and this process do not fit together."""


class WorkerUnavailable(ClusterError):  # noqa: N818
    """A worker does not answer, or belongs to another client."""


class WorkerLost(ClusterError):  # noqa: N818
    """A worker was there and is gone; this process cannot do without it any more."""


def end_process(error: ClusterError) -> NoReturn:
    """Prints an error and ends this process at once, with status 75.

    Python's own way out waits for TensorFlow, which waits for the lost worker.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
    os._exit(EX_TEMPFAIL)
