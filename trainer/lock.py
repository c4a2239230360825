"""One trainer to a folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from trainer.errors import UsageError


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the lock of a run's folder.

    Raises:
        UsageError: If another process holds it, or it is no file that can be written.
    """
    path = folder / "lock"
    try:
        # Without a buffer, which a full disk would have fail again when it is closed.
        opened = path.open("a+b", buffering=0)
    except OSError as error:
        raise UsageError(
            f"Expected a --logdir that can be written to; {path} cannot: "
            f"{error.strerror}."
        ) from None
    with opened as file:
        if not _taken(file):
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "another process"
            raise UsageError(
                f"Expected a --logdir that no other trainer is at work in; {folder} is "
                f"in use by {holder}. Wait for that, end it, or give another --logdir."
            ) from None
        _write(file, f"process {os.getpid()} on {socket.gethostname()}\n")
        try:
            yield
        finally:
            _write(file, "")


def _taken(file: FileIO) -> bool:
    """Takes a lock, unless another trainer has it for longer than `is_held` does."""
    for _ in range(5):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.02)
    return False


def is_held(folder: Path) -> bool:
    """Returns whether a trainer is at work in a folder."""
    try:
        with (folder / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, IsADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


def _write(file: FileIO, text: str) -> None:
    """Says who holds the lock; a full disk is no reason not to."""
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(text.encode())
