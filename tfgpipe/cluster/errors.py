"""Errors between hosts, exit codes that ask for a restart, parent-death watch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

EX_TEMPFAIL = 75
"""Exit code of a temporary failure, as in sysexits.h: the same command goes on."""
EXIT_PREEMPTED = 42
"""Exit code after a request to stop, with all saved: the same command goes on."""


class ClusterError(RuntimeError):
    """The workers and this process do not fit together."""


class WorkerUnavailable(ClusterError):  # noqa: N818
    """A worker does not answer, or belongs to another client."""


class WorkerLost(ClusterError):  # noqa: N818
    """A worker was there and is gone; this process cannot do without it any more."""


def end_process(error: ClusterError) -> NoReturn:
    """Prints an error and ends this process with status 75, without cleaning up.

    Python's own way out waits for TensorFlow, which waits for the lost worker.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
    os._exit(EX_TEMPFAIL)


def exit_with_parent() -> None:
    """Ends this process once its standard input closes.

    The kernel closes it when the parent is gone, also by `kill -9`, which no signal
    handler sees. Signals that a terminal or an engine sends to all processes of a job
    are left to the parent.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True, name="parent watch").start()
