"""Processes with all that they start, which do not outlive the one that starts them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# Kills process groups once its standard input closes, which the kernel does when the
# supervisor is gone, also by `kill -9`. A group is named when it starts, and again when
# it has ended.
_GUARD = """
import contextlib, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    groups ^= {int(line)}
for group in groups:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
"""


class Groups:
    """Processes with all that they start, which end with this one at the latest."""

    def __init__(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-IS", "-c", _GUARD],
            bufsize=0,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Starts a process."""
        process = subprocess.Popen(command, start_new_session=True, **options)
        self._tell(process)
        return process

    def signal(self, process: subprocess.Popen[bytes], number: int) -> None:
        """Sends a signal to a process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kills a process and all that it has started."""
        self.signal(process, signal.SIGKILL)
        self._tell(process)
        process.wait()

    def close(self) -> None:
        """Ends the guard."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def _tell(self, process: subprocess.Popen[bytes]) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # Somebody has killed it.
            self._guard.stdin.write(b"%d\n" % process.pid)


def ending(status: int) -> str:
    """Returns the end of a process in words: its exit status, negative for a signal."""
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"
