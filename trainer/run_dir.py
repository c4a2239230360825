"""The folder of a run: its hyperparameters in `params.txt`, its lock, its checkpoints.

Digests of files that must not change, as a tokenizer's, are in `params.txt`, too.

The lock lets one trainer into a folder; it ends with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from tfgpipe_trainer import hooks, hyperparams
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.errors import UsageError
from tfgpipe_trainer.experiment import FORMER, Experiment
from tfgpipe_trainer.hyperparams import HyperparameterError

_PARAMS = "params.txt"
_CHANGES = "changes.txt"
_DIGEST = "# sha256 of "
# What follows from the number of hosts that are there, if it may change.
_OF_HOSTS = tuple(
    f"pipelining.{name}: "
    for name in ("num_stages", "num_replicas", "layers_per_stage")
)
# From the start of a trainer to its lock.
_BEGINNING_SECONDS = 20.0


def checkpoints(folder: Path) -> Path:
    """Returns the folder of a run's checkpoints."""
    return folder / "checkpoints"


def holds_run(folder: Path) -> bool:
    """Returns whether there is anything to go on with: a checkpoint."""
    return bool(store.steps(checkpoints(folder)))


def read(folder: Path) -> tuple[str, str]:
    """Returns the name of a run's experiment, and its hyperparameters as text.

    Raises:
        HyperparameterError: If it is no run's folder, or its file is no text.
    """
    try:
        written = (folder / _PARAMS).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise HyperparameterError(
            f"{folder}: expected the folder of a run, which has a {_PARAMS}; "
            f"{error.strerror}."
        ) from None
    except UnicodeDecodeError:
        raise HyperparameterError(
            f"{folder / _PARAMS}: expected the hyperparameters of a run, as text; "
            "received bytes that are none. Bring it back from a copy, or give another "
            "--logdir."
        ) from None
    heading, _, text = written.partition("\n")
    if not heading.startswith("# "):
        raise HyperparameterError(
            f"{folder / _PARAMS}: expected the hyperparameters of a run, the first "
            f"line of which is `# EXPERIMENT`; received {heading[:80]!r} there. Bring "
            "it back from a copy, or give another --logdir."
        )
    name = heading.removeprefix("# ")
    return FORMER.get(name, name), text


def write_params(folder: Path, *, name: str, experiment: Experiment) -> None:
    """Writes down whose run the folder is, now that it goes on, or begins.

    What has changed since it was begun, and when, is kept in `changes.txt`.

    Raises:
        UsageError: If that cannot be written.
    """
    with refuse_unwritable(folder):
        if holds_run(folder):
            difference = _difference(folder, name, experiment)
            if not difference:
                return
            step = store.steps(checkpoints(folder))[-1]
            with (folder / _CHANGES).open("a", encoding="utf-8") as file:
                file.write(f"# from step {step}\n{difference}\n")
            print(f"Changed from step {step}:\n{difference}", flush=True)
        own = hooks.call(experiment, "file_hashes")
        digests = [f"{_DIGEST}{n} = {d}\n" for n, d in own.items()]
        text = f"# {name}\n{''.join(digests)}{hyperparams.to_text(experiment)}"
        store.atomic_write(folder / _PARAMS, text)


@contextlib.contextmanager
def refuse_unwritable(folder: Path) -> Iterator[None]:
    """Raises UsageError if what is done inside finds that a folder cannot be."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"Expected a --logdir that can be written to; {error.filename or folder} "
            f"cannot: {error.strerror}."
        ) from None


def ensure_writable(folder: Path) -> Path:
    """Returns a folder, which is made if need be.

    Raises:
        UsageError: If files cannot be written to it.
    """
    with refuse_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder


def wait_for_run(folder: Path) -> None:
    """Waits until a run has begun in a folder, or has left a checkpoint.

    Raises:
        UsageError: If none begins in time.
    """
    deadline = time.monotonic() + _BEGINNING_SECONDS
    while not holds_run(folder):
        if is_held(folder):
            if (folder / _PARAMS).exists():
                return
        elif time.monotonic() > deadline:
            raise UsageError(
                f"{folder} holds no checkpoint to evaluate, and nobody trains there."
            )
        time.sleep(0.1)


def check(folder: Path, *, name: str, experiment: Experiment) -> None:
    """Checks that a folder is of a run of these hyperparameters.

    Raises:
        HyperparameterError: If it is of others.
    """
    difference = _difference(folder, name, experiment)
    if experiment.pipelining.num_hosts is not None:
        lines = difference.splitlines()
        difference = "\n".join(x for x in lines if not x.startswith(_OF_HOSTS))
    if difference:
        raise HyperparameterError(
            f"{folder} holds a run of other hyperparameters (its -> yours):\n\n"
            f"{difference}\n\nGive another --logdir, or its hyperparameters, or go on "
            "with yours by --allow_changes."
        )


def check_files(folder: Path, experiment: Experiment) -> None:
    """Checks that files which must not change are those that a run was trained with.

    Raises:
        HyperparameterError: If they are others.
    """
    _, text = read(folder)
    difference = _changed_files(text, experiment)
    if difference:
        raise HyperparameterError(
            f"{folder} holds a run of other files (its -> yours):\n\n{difference}\n\n"
            "Bring back its files, or go on with yours by --allow_changes."
        )


def _difference(folder: Path, name: str, experiment: Experiment) -> str:
    theirs, text = read(folder)
    if theirs != name:
        return f"{theirs} -> {name}"
    own = hyperparams.from_text(text, type(experiment))
    differences = hyperparams.diff(own, experiment), _changed_files(text, experiment)
    return "\n".join(filter(None, differences))


def _changed_files(text: str, experiment: Experiment) -> str:
    lines = [line for line in text.splitlines() if line.startswith(_DIGEST)]
    parts = (line.removeprefix(_DIGEST).partition(" = ") for line in lines)
    theirs = {name: digest or "none" for name, _, digest in parts}
    yours = hooks.call(experiment, "file_hashes")
    return "\n".join(
        f"sha256 of {name}: {theirs[name]} -> {yours[name]}"
        for name in theirs
        if name in yours and theirs[name] != yours[name]
    )


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
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
    """Writes the holder of the lock to its file; a full disk is no error."""
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(text.encode())
