"""The folder of a run at `s3://`, `gs://` or `hdfs://`, kept in step with a copy here.

TensorFlow and everything else write to a folder of this machine. A thread copies what
has changed, and removes what is gone. Stores of objects have no renaming, so a
checkpoint counts once `complete.json` is there, which is written last and removed
first:

    checkpoints/step-00000400/state.index
                              state.data-00000-of-00001
                              complete.json     {"time": ..., "files": {NAME: SHA-256}}

A start fetches the run anew, so a checkpoint that another machine has left is as good
as one's own. `lock.json` is renewed all the time: that of a trainer that was killed on
another machine ends by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tfgpipe_trainer import files
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.errors import CheckpointError, StoppedError, UsageError
from tfgpipe_trainer.progress import report

_COMPLETE = "complete.json"
_LOCK = "lock.json"
_CHECKPOINT = re.compile(rf"checkpoints/step-(\d{{8,}})/{_COMPLETE}")
# Seconds between two copies, between two renewals of the lock, and until one that is
# not renewed is nobody's.
_COPY_SECONDS, _RENEW_SECONDS, _LEASE_SECONDS = 10.0, 15.0, 90.0
# Attempts to copy all at the end, and seconds between them.
_ATTEMPTS, _ATTEMPT_SECONDS = 6, 5.0


@contextlib.contextmanager
def trained(url: str, *, host: int, is_chief: bool) -> Iterator[Path]:
    """Yields the folder here that a run trains in, copied to its own meanwhile.

    Args:
        url: The run's folder.
        host: Index of this host.
        is_chief: True for the host that writes.

    Raises:
        UsageError: If it cannot be reached, or another trainer is at work there.
        CheckpointError: If it could not be copied in the end; it is here then.
    """
    name = hashlib.sha256(f"{url} {host}".encode()).hexdigest()[:16]
    run = RemoteRun(url, files.cache_folder() / "runs" / name)
    with contextlib.ExitStack() as stack:
        if is_chief:
            stack.enter_context(run.lock())
        run.fetch(all_steps=False)
        print(f"{url} is copied from {run.folder}.", flush=True)
        if is_chief:
            stack.enter_context(run.copied())
        yield run.folder


@contextlib.contextmanager
def read(url: str) -> Iterator[Path]:
    """Yields a copy of a run; new files in it are copied to the run at the end.

    Raises:
        UsageError: If it cannot be reached.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = RemoteRun(url, Path(folder))
        run.fetch(all_steps=True)
        yield run.folder
        run.push()


class RemoteRun:
    """A run's folder on another machine, and the copy of it here.

    Args:
        url: The folder, such as `s3://bucket/run`.
        folder: The copy.

    Raises:
        UsageError: If its scheme has no driver.
    """

    def __init__(self, url: str, folder: Path) -> None:
        from fsspec.core import url_to_fs

        self.url, self.folder = url.rstrip("/"), folder
        try:
            options = {"auto_mkdir": True} if url.startswith("file:") else {}
            self._fs, self._root = url_to_fs(
                self.url, use_listings_cache=False, **options
            )
        except (ImportError, ValueError) as error:
            raise UsageError(files.no_driver("--logdir", url, error)) from None
        self._copied: dict[str, tuple[int, int]] = {}  # Size, and time of change.
        self._steps: dict[int, float] = {}  # Whole ones there, and their times.
        self._id = uuid.uuid4().hex

    def fetch(self, *, all_steps: bool) -> None:
        """Fetches files, and all whole checkpoints or the newest.

        Raises:
            UsageError: If it cannot be read.
        """
        self._trying(lambda: self._fetch(all_steps=all_steps))

    def _fetch(self, *, all_steps: bool) -> None:
        checkpoints = self.folder / "checkpoints"
        shutil.rmtree(self.folder, ignore_errors=True)
        checkpoints.mkdir(parents=True)
        self._copied, self._steps = {}, {}
        names = self._names()
        for name in names:
            if not name.startswith("checkpoints/") and name != _LOCK:
                self._get(name)
        found = filter(None, map(_CHECKPOINT.fullmatch, names))
        is_needed = True
        for step in sorted((int(each[1]) for each in found), reverse=True):
            about = json.loads(self._fs.cat_file(self._at(step, _COMPLETE)))
            if is_needed and not self._get_step(step, about["files"]):
                continue  # It is to be written anew, if the run comes there.
            self._steps[step] = about["time"]
            is_needed = all_steps
        here = store.steps(checkpoints)
        others = {s: t for s, t in self._steps.items() if s not in here}
        store.write_elsewhere(checkpoints, others)

    def _names(self) -> list[str]:
        """Returns the names of all files there."""
        if not self._fs.exists(self._root):
            return []
        return [path[len(self._root) + 1 :] for path in self._fs.find(self._root)]

    def _get(self, name: str) -> None:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(self._at(name), str(target))
        self._copied[name] = _state(target)

    def _get_step(self, step: int, digests: dict[str, str]) -> bool:
        """Fetches a checkpoint; returns whether it is as it was written."""
        target = store.path_of(self.folder / "checkpoints", step)
        target.mkdir()
        for name, digest in digests.items():
            with contextlib.suppress(FileNotFoundError):
                self._fs.get_file(self._at(step, name), str(target / name))
            if not (target / name).exists() or _digest(target / name) != digest:
                report(f"The checkpoint of step {step} in {self.url} is damaged.")
                shutil.rmtree(target)
                return False
        return True

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the lock.

        Raises:
            UsageError: If another trainer has it, or it cannot be written.
        """
        self._trying(self._take)
        try:
            with _repeating(self._renew, _RENEW_SECONDS, self._failed):
                yield
        finally:
            with contextlib.suppress(Exception):  # It ends by itself as well.
                if self._is_ours():
                    self._fs.rm_file(self._at(_LOCK))

    def _take(self) -> None:
        before = self._lock()
        if before is not None and not _is_of_the_dead(before):
            print(f"Waiting: {before['holder']} may be at work there.", flush=True)
            deadline = time.monotonic() + _LEASE_SECONDS
            while time.monotonic() < deadline and self._lock() == before:
                time.sleep(1.0)
            if (now := self._lock()) not in (None, before):
                raise UsageError(
                    f"Expected a --logdir that no other trainer is at work in; "
                    f"{self.url} is in use by {now['holder']}. Wait for that, end it, "
                    "or give another --logdir."
                )
        self._write_lock()
        time.sleep(0.5)
        if not self._is_ours():
            raise UsageError(f"Another trainer has begun in {self.url} just now.")

    def _lock(self) -> Any:
        try:
            return json.loads(self._fs.cat_file(self._at(_LOCK)))
        except (FileNotFoundError, ValueError):
            return None

    def _is_ours(self) -> bool:
        lock = self._lock()
        return lock is not None and lock["id"] == self._id

    def _write_lock(self) -> None:
        lock = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "host": socket.gethostname(),
            "process": os.getpid(),
            "id": self._id,
            "time": time.time(),
        }
        self._fs.pipe_file(self._at(_LOCK), json.dumps(lock).encode())

    def _renew(self) -> None:
        if not self._is_ours():
            raise OSError(f"another trainer is at work in {self.url}")
        self._write_lock()

    @contextlib.contextmanager
    def copied(self) -> Iterator[None]:
        """Copies what changes here, and at the end all of it.

        Raises:
            CheckpointError: If it could not be in the end.
        """
        try:
            with _repeating(self._push_ours, _COPY_SECONDS, self._failed):
                yield
        except StoppedError:
            self._push_at_last()
            raise
        except BaseException:
            with contextlib.suppress(CheckpointError):
                self._push_at_last()
            raise
        self._push_at_last()

    def _push_at_last(self) -> None:
        try:
            self._trying(self._push_ours)
        except UsageError as error:
            raise CheckpointError(
                f"The run could not be copied to {self.url}. It is in {self.folder}; "
                f"copy it, as the same command fetches what is there. {error}"
            ) from None

    def _push_ours(self) -> None:
        self._renew()
        self.push()

    def push(self) -> None:
        """Copies files and checkpoints that are new here, and removes those gone here.

        Raises:
            OSError: If that fails.
        """
        here = {
            name.as_posix(): path
            for path in self.folder.rglob("*")
            for name in [path.relative_to(self.folder)]
            if path.is_file() and not _is_of_this_machine(name)
        }
        for name, path in here.items():
            with contextlib.suppress(FileNotFoundError):  # Gone again.
                state = _state(path)
                if self._copied.get(name) != state:
                    self._fs.put_file(str(path), self._at(name))
                    self._copied[name] = state
        for name in [each for each in self._copied if each not in here]:
            self._remove(self._at(name))
            del self._copied[name]
        checkpoints = self.folder / "checkpoints"
        kept = [*store.steps(checkpoints), *store.elsewhere(checkpoints)]
        for step in kept:
            if step not in self._steps:
                self._put_step(checkpoints, step)
        for step in [each for each in self._steps if each not in kept]:
            self._remove(self._at(step, _COMPLETE))
            self._fs.rm(self._at(step), recursive=True)
            del self._steps[step]

    def _put_step(self, checkpoints: Path, step: int) -> None:
        place = store.path_of(checkpoints, step)
        try:
            written = store.metadata(checkpoints, step).time
            digests = {path.name: _digest(path) for path in place.iterdir()}
            for name in digests:
                self._fs.put_file(str(place / name), self._at(step, name))
        except (FileNotFoundError, store.DamagedError):
            return  # A newer one has made it superfluous.
        about = {"time": written, "files": digests}
        self._fs.pipe_file(self._at(step, _COMPLETE), json.dumps(about).encode())
        self._steps[step] = written

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _at(self, place: str | int, *names: str) -> str:
        """Returns the path there of a file, or of something of a checkpoint."""
        if isinstance(place, int):
            place = f"checkpoints/{store.path_of(Path(), place).name}"
        return "/".join([self._root, place, *names])

    def _failed(self, error: Exception) -> None:
        report(
            f"Copying to {self.url} has failed, and is tried again: {_reason(error)}."
        )

    def _trying(self, do: Callable[[], None]) -> None:
        """Calls a function, and retries where that may help.

        Raises:
            UsageError: If it cannot be done.
        """
        for attempt in range(_ATTEMPTS):
            try:
                do()
                return
            except UsageError:
                raise
            except Exception as error:  # Drivers have errors of their own.
                # A checkpoint may be gone as it is fetched, and a newer one there.
                most = 2 if isinstance(error, FileNotFoundError) else _ATTEMPTS
                if isinstance(error, PermissionError) or attempt == most - 1:
                    raise UsageError(
                        "Expected a --logdir that can be read and written; "
                        f"{self.url} cannot: {_reason(error)}."
                    ) from error
                self._failed(error)
            time.sleep(_ATTEMPT_SECONDS)


@contextlib.contextmanager
def _repeating(
    do: Callable[[], None], seconds: float, failed: Callable[[Exception], None]
) -> Iterator[None]:
    """Calls a function periodically in a thread; of failures in a row, reports one."""
    over = threading.Event()

    def repeat() -> None:
        fails = False
        while not over.wait(seconds):
            try:
                do()
                fails = False
            except Exception as error:  # Whatever it is, training goes on.
                if not fails:
                    failed(error)
                fails = True

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_of_the_dead(lock: dict[str, Any]) -> bool:
    """Returns whether its process was one of this machine, and is no more."""
    here = lock["host"] == socket.gethostname()
    return here and not psutil.pid_exists(lock["process"])


def _is_of_this_machine(name: Path) -> bool:
    """Returns whether a file is not copied, or as a part of a checkpoint."""
    is_writing = any("writing" in part for part in name.parts)
    return is_writing or name.parts[0] in ("lock", "checkpoints")


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
