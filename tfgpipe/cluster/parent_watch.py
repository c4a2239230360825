"""Parent-death watch: a process that ends with the one that started it."""

from __future__ import annotations

import os
import signal
import sys
import threading


def exit_with_parent() -> None:
    """Ends this process once its standard input closes.

    The kernel closes it when the parent is gone, also by `kill -9`, which no signal
    handler sees. Ctrl-C is left to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait, daemon=True, name="parent watch").start()


def _wait() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(0)
