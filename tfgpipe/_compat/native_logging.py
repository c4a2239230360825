"""Silences what TensorFlow's C++ code writes on stderr when it starts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# The stream itself, while it is redirected.
_redirected: list[int] = []


@contextlib.contextmanager
def native_logging_off() -> Iterator[None]:
    """Silences TensorFlow's C++ code, unless TF_CPP_MIN_LOG_LEVEL is 0 or 1.

    TensorFlow reads that variable, which is 2 inside if it is not set, when it is first
    imported. That is too late for what TensorFlow 2.21 writes meanwhile, so the stream
    itself is redirected. Python's errors are seen as they leave this context; what a
    thread says meanwhile is not, unless it calls `restore_stderr`.
    """
    level = os.environ.get(_LEVEL)
    if level in ("0", "1"):
        yield
        return
    os.environ.setdefault(_LEVEL, "2")
    sys.stderr.flush()
    stderr = os.dup(2)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    _redirected.append(stderr)
    try:
        yield
    finally:
        os.dup2(_redirected.pop(), 2)
        os.close(stderr)
        os.close(devnull)
        if level is None:
            del os.environ[_LEVEL]


def restore_stderr() -> None:
    """Has stderr heard again, for the last words of a process."""
    for descriptor in _redirected:
        os.dup2(descriptor, 2)
