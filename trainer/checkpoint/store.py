"""A checkpoint on disk: a folder that is there whole, or not at all.

    step-00000400/
        state.index, state.data-00000-of-00001    the values, as TensorFlow writes them
        about.json                  format, step, time, checksums of the files
        about.sha256                              the checksum of that

It is written beside its place under another name, flushed to the disk and then renamed.
A process that is killed leaves a `.writing-*` folder at worst, which nobody reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.devices import here
from trainer.errors import CheckpointError

if TYPE_CHECKING:
    import tensorflow as tf


_NAME = re.compile(r"step-(\d+)")
_WRITING = ".writing-"
_ABOUT = "about.json"
_CHECKSUM = "about.sha256"
_CHUNK = 1 << 22
# Of `about.json`: a change of its fields, or of those of `RunState`, adds one.
# What was written before there was a number counts as 0, and has the fields of 1.
FORMAT = 1
_FIELDS = {"step": int, "time": float, "notes": dict, "files": dict}


class DamagedError(Exception):
    """A checkpoint is not as it was written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What a checkpoint says of itself.

    Attributes:
        step: How many steps the run had done.
        time: When it was written, in seconds since 1970.
        notes: What else a run has to remember.
    """

    step: int
    time: float
    notes: Mapping[str, Any]


def place(folder: Path, step: int) -> Path:
    """Returns where the checkpoint of a step is, or would be."""
    return folder / f"step-{step:08}"


def steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


@contextlib.contextmanager
def writing(folder: Path, step: int, notes: Mapping[str, Any]) -> Iterator[Path]:
    """Has a checkpoint come into being.

    Yields:
        A folder to write its files to. Those become the checkpoint afterwards.

    Args:
        folder: Where checkpoints are.
        step: Its step.
        notes: What is to be remembered, as JSON can.

    Raises:
        OSError: If it could not be written; nothing is left of it then.
    """
    aside = folder / f"{_WRITING}{step}-{os.getpid()}"
    try:
        aside.mkdir(parents=True)
        yield aside
        body = {
            "format": FORMAT,
            "step": step,
            "time": time.time(),
            "notes": dict(notes),
            "files": {path.name: _look(path) for path in sorted(aside.iterdir())},
        }
        (aside / _ABOUT).write_text(json.dumps(body, indent=1), encoding="utf-8")
        checksum = _look(aside / _ABOUT)["sha256"]
        (aside / _CHECKSUM).write_text(f"{checksum}  {_ABOUT}\n", encoding="utf-8")
        for path in (*aside.iterdir(), aside):
            flush(path)
        target = place(folder, step)
        remove(target)
        aside.rename(target)
        flush(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def about(folder: Path, step: int) -> About:
    """Returns what a checkpoint says of itself.

    Raises:
        DamagedError: If that is not as it was written.
        CheckpointError: If another version has written it.
    """
    return _about(place(folder, step))[0]


def check(folder: Path, step: int) -> About:
    """Returns what a checkpoint says of itself, having looked at every byte.

    Raises:
        DamagedError: If it is not as it was written.
        CheckpointError: If another version has written it.
    """
    at = place(folder, step)
    found, files = _about(at)
    for name, written in files.items():
        with _reading(name):
            look = _look(at / name)
        if look["bytes"] != written["bytes"]:
            raise DamagedError(
                f"{name} has {look['bytes']:,} of {written['bytes']:,} bytes"
            )
        if look != written:
            raise DamagedError(f"{name} has another checksum than when it was written")
    return found


def _about(at: Path) -> tuple[About, Mapping[str, Any]]:
    """Returns what a checkpoint says of itself, and of its files."""
    with _reading(_ABOUT):
        line = f"{_look(at / _ABOUT)['sha256']}  {_ABOUT}\n".encode()
        text = (at / _ABOUT).read_text(encoding="utf-8", errors="replace")
    with _reading(_CHECKSUM):
        if (at / _CHECKSUM).read_bytes() != line:
            raise DamagedError(f"{_ABOUT} has another checksum than {_CHECKSUM} says")
    try:
        body = json.loads(text)
    except ValueError as error:
        raise DamagedError(f"{_ABOUT} is no JSON: {error}") from None
    _check_format(body, at)
    files = body.pop("files")
    for name in files:
        if name in (".", "..") or name != Path(name).name:
            raise DamagedError(f"{name!r} names no file of the checkpoint's own folder")
    return About(step=body["step"], time=body["time"], notes=body["notes"]), files


def _check_format(body: Any, at: Path) -> None:
    """Refuses what is as it was written, but not as this version writes it."""
    given = body if isinstance(body, dict) else {}
    written = given.get("format", 0)
    if written not in range(FORMAT + 1):
        raise CheckpointError(
            f"Expected a checkpoint of format {FORMAT} or before; that in {at} is of "
            f"format {written!r}. Go on with the version that wrote it, or a later one."
        )
    wrong = [
        name for name, kind in _FIELDS.items() if not isinstance(given.get(name), kind)
    ]
    if "files" not in wrong and not all(map(_is_of_file, given["files"].values())):
        wrong.append("files")
    unknown = sorted(given.keys() - _FIELDS.keys() - {"format"})
    if wrong or unknown:
        raise CheckpointError(
            f"Expected {_ABOUT} of {at} to hold {', '.join(_FIELDS)} alone; received "
            f"{', '.join(given) or 'none of them'}, of which "
            f"{', '.join([*wrong, *unknown])} cannot be used. Go on with the version "
            "that wrote it, or move that folder away to go on from the one before."
        )


def _is_of_file(written: Any) -> bool:
    return isinstance(written, dict) and written.keys() == {"bytes", "sha256"}


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DamagedError(f"{name} cannot be read: {error.strerror}") from None


def remove(path: Path) -> None:
    """Removes a checkpoint; whoever looks finds it whole or not at all."""
    if path.exists():
        aside = path.with_name(f"{_WRITING}gone-{path.name}-{os.getpid()}")
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def set_aside(folder: Path, step: int) -> Path:
    """Moves a damaged checkpoint out of the way and returns where it is now."""
    at = place(folder, step)
    number = 0
    while (target := folder / f"damaged-{number}-{at.name}").exists():
        number += 1
    at.rename(target)
    return target


def sweep(folder: Path) -> None:
    """Removes what killed processes have left half written."""
    for path in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _look(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def replace(path: Path, content: str | bytes) -> None:
    """Replaces what is in a file: whoever looks finds the old or the new.

    Raises:
        OSError: If that is not possible; the old one is there then.
    """
    aside = path.with_name(f"{path.name}.writing")
    aside.write_bytes(content.encode() if isinstance(content, str) else content)
    flush(aside)
    aside.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until a file, or a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_PREFIX = "state"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclasses.dataclass(kw_only=True)
class RunState:
    """What has happened so far that decides how a run goes on.

    Attributes:
        best_step: The step of the best evaluation.
        best_value: What it measured.
        num_worse: Evaluations since.
        skipped: Steps left out because they were not finite.
        loss_sum: The sum of the losses since the last record of `metrics.jsonl`.
        num_losses: How many those are.
    """

    best_step: int | None = None
    best_value: float | None = None
    num_worse: int = 0
    skipped: list[int] = dataclasses.field(default_factory=list)
    loss_sum: float = 0.0
    num_losses: int = 0

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> RunState:
        """Returns the notes of a checkpoint.

        Raises:
            CheckpointError: If they are not those of this version.
        """
        # Format 1 had no losses.
        written = {"loss_sum": 0.0, "num_losses": 0, **written}
        expected = [each.name for each in dataclasses.fields(cls)]
        if sorted(written) != sorted(expected):
            raise CheckpointError(
                "Expected a checkpoint whose notes, in its about.json, are "
                f"{', '.join(expected)}; received {', '.join(written) or 'none'}. Go "
                "on with the version that wrote it."
            )
        return cls(**written)

    def is_over(self, patience: int | None) -> bool:
        """Returns whether a run ends here, as too long nothing was better."""
        return patience is not None and self.num_worse >= patience

    def written(self) -> dict[str, Any]:
        """Returns them as a checkpoint takes them."""
        return dataclasses.asdict(self)


def superfluous(
    times: Mapping[int, float],
    *,
    keep: int,
    keep_hours: float | None = None,
    best: int | None = None,
) -> list[int]:
    """Returns the steps whose checkpoints may go.

    The last `keep` stay, the best one, and of the others one every `keep_hours`, from
    the first on: those that stay are far enough apart, whatever has gone before.

    >>> times = {1: 0.0, 2: 1800.0, 3: 3600.0, 4: 5400.0}
    >>> superfluous(times, keep=1)
    [1, 2, 3]
    >>> superfluous(times, keep=1, keep_hours=1)
    [2]

    Args:
        times: When the checkpoint of each step was written, in seconds.
        keep: How many of the last stay.
        keep_hours: Hours between those that stay for good, or None for none.
        best: The step of one that stays in any case.
    """
    ordered = sorted(times)
    staying = {*ordered[-keep:], best}
    if keep_hours is not None:
        last = None
        for step in ordered:
            if last is None or times[step] - last >= 3600 * keep_hours:
                last = times[step]
                staying.add(step)
    return [step for step in ordered if step not in staying]


def write_tensors(folder: Path, tensors: Mapping[str, tf.Tensor]) -> None:
    """Writes tensors to a folder.

    Raises:
        tf.errors.OpError: If that fails.
    """
    import tensorflow as tf

    with tf.device(here()):
        tf.raw_ops.SaveV2(
            prefix=str(folder / _PREFIX),
            tensor_names=list(tensors),
            shape_and_slices=[""] * len(tensors),
            tensors=list(tensors.values()),
        )


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Returns the tensors in a folder, by name."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(folder / _PREFIX))
    return {name: reader.get_tensor(name) for name in tensor_shapes(folder)}


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in a folder, by name."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(folder / _PREFIX))
    found = reader.get_variable_to_shape_map()
    return {name: tuple(found[name]) for name in sorted(found)}


def is_disk_full(error: Exception) -> bool:
    """Returns whether an error says that a disk, or a quota of it, has no room left."""
    import tensorflow as tf

    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    # TensorFlow has one kind of error for all that is used up.
    return isinstance(error, tf.errors.ResourceExhaustedError) and any(
        os.strerror(number) in error.message for number in _NO_ROOM
    )
