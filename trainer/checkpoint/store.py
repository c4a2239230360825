"""A checkpoint on disk: a folder that is there whole, or not at all.

    step-00000400/
        state.index, state.data-00000-of-00001    a checkpoint as TensorFlow writes it

It holds the values by name, and what else a run has to remember, as JSON in a tensor of
strings. TensorFlow stores a checksum with each tensor and each block of the index, and
compares it when it reads: reading a checkpoint is the check of it.

A folder is written beside its place under another name, flushed to the disk and then
renamed. A process that is killed leaves a `.writing-*` folder at worst, which nobody
reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfgpipe_trainer.devices import host_device
from tfgpipe_trainer.errors import CheckpointError

if TYPE_CHECKING:
    import tensorflow as tf


_NAME = re.compile(r"step-(\d+)")
_WRITING = ".writing-"
_ELSEWHERE = "elsewhere.json"
_PREFIX = "state"
# No variable has a name that begins so.
_ABOUT = "/about"
# A change of what that holds, or of the fields of `RunState`, adds one. Formats 0 and 1
# had it in a file.
FORMAT = 3
_OLDEST = 2
_KINDS: Mapping[str, Any] = {
    "step": int,
    "time": (int, float),
    "notes": dict,
    "tensors": dict,
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class DamagedError(Exception):
    """A checkpoint is not as it was written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """The description that a checkpoint has of itself.

    Attributes:
        step: Number of steps that the run had done.
        time: Time at which the values were copied, in seconds since 1970.
        notes: The `RunState` as JSON.
    """

    step: int
    time: float
    notes: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        metadata: Its description.
        values: The values of variables, by name.
    """

    metadata: Metadata
    values: Mapping[str, tf.Tensor]


def path_of(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of a step, whether it is there or not."""
    return folder / f"step-{step:08}"


def steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    return sorted(
        int(match[1])
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name))
        and path_of(folder, int(match[1])) == path
    )


def misnamed(folder: Path) -> list[Path]:
    """Returns paths that look like checkpoints, but have not the names of steps."""
    if not folder.is_dir():
        return []
    known = {path_of(folder, step) for step in steps(folder)}
    return sorted(
        path
        for path in folder.iterdir()
        if _NAME.match(path.name) and path not in known
    )


@contextlib.contextmanager
def writing(folder: Path, step: int) -> Iterator[Path]:
    """Makes a folder into a checkpoint when its files are written.

    Yields:
        A folder to write its files to. Those become the checkpoint afterwards.

    Args:
        folder: The folder of checkpoints.
        step: Its step.

    Raises:
        OSError: If it could not be written; nothing is left of it then.
    """
    aside = folder / f"{_WRITING}{step}-{os.getpid()}"
    try:
        aside.mkdir(parents=True)
        yield aside
        for path in (*aside.iterdir(), aside):
            flush(path)
        target = path_of(folder, step)
        remove(target)
        aside.rename(target)
        flush(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint.

    Raises:
        OSError: If it could not be written; nothing is left of it then.
        tf.errors.OpError: If TensorFlow could not write it; nothing is left then.
    """
    body = {
        "format": FORMAT,
        **dataclasses.asdict(checkpoint.metadata),
        # TensorFlow's list of names is shorter, without an error, if a block of the
        # index is damaged; a name that is looked up and not found is an error.
        "tensors": {name: x.dtype.name for name, x in checkpoint.values.items()},
    }
    with writing(folder, checkpoint.metadata.step) as aside:
        write_tensors(aside, {_ABOUT: json.dumps(body), **checkpoint.values})


def write_tensors(folder: Path, tensors: Mapping[str, tf.Tensor | str]) -> None:
    """Writes tensors to a folder.

    Raises:
        tf.errors.OpError: If that fails.
    """
    import tensorflow as tf

    with tf.device(host_device()):
        tf.raw_ops.SaveV2(
            prefix=str(folder / _PREFIX),
            tensor_names=list(tensors),
            shape_and_slices=[""] * len(tensors),
            tensors=list(tensors.values()),
        )


def metadata(folder: Path, step: int) -> Metadata:
    """Returns the description of a checkpoint, without reading its values.

    Raises:
        DamagedError: If that is not as it was written.
        CheckpointError: If a later version has written it.
    """
    return _metadata(_read_body(path_of(folder, step), step))


def read(folder: Path, step: int) -> Checkpoint:
    """Returns a checkpoint, every byte of which has been compared with its checksum.

    Raises:
        DamagedError: If it is not as it was written.
        CheckpointError: If a later version has written it.
    """
    at = path_of(folder, step)
    body = _read_body(at, step)
    return Checkpoint(
        metadata=_metadata(body), values=_read_tensors(at, body["tensors"])
    )


def _metadata(body: Mapping[str, Any]) -> Metadata:
    return Metadata(step=body["step"], time=body["time"], notes=body["notes"])


def _read_body(at: Path, step: int) -> dict[str, Any]:
    if (at / "about.json").exists():
        body: dict[str, Any] = {"format": 1}
    else:
        body = _parsed(_read_tensors(at, {_ABOUT: "string"})[_ABOUT].numpy())
    if type(body.get("format")) is not int:
        raise DamagedError("what it says of itself has no format")
    if not _OLDEST <= body["format"] <= FORMAT:
        raise CheckpointError(
            f"Expected a checkpoint of format {_OLDEST} to {FORMAT}; that in {at} is "
            f"of format {body['format']}. Go on with the version that wrote it."
        )
    for name, kinds in _KINDS.items():
        if not isinstance(body.get(name), kinds):
            raise DamagedError(f"what it says of itself has no fit {name}")
    if body["step"] != step:
        raise DamagedError(f"it says that it is of step {body['step']}")
    return body


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise DamagedError("what it says of itself is no JSON object")
    return body


def _read_tensors(at: Path, dtypes: Mapping[str, str]) -> dict[str, tf.Tensor]:
    """Returns tensors of a checkpoint, by name."""
    import tensorflow as tf

    try:
        known = [tf.as_dtype(dtype) for dtype in dtypes.values()]
    except TypeError as error:
        raise DamagedError(f"its values cannot be read: {error}") from None
    try:
        with tf.device(host_device()):
            tensors = tf.raw_ops.RestoreV2(
                prefix=str(at / _PREFIX),
                tensor_names=list(dtypes),
                shape_and_slices=[""] * len(dtypes),
                dtypes=known,
            )
    except tf.errors.ResourceExhaustedError:  # Says nothing about the files.
        raise
    except tf.errors.OpError as error:
        reason = re.sub(r"^\{\{.*?\}\} | \[Op:.*", "", error.message)
        raise DamagedError(f"its values cannot be read: {reason}") from None
    return dict(zip(dtypes, tensors, strict=True))


def elsewhere(folder: Path) -> dict[int, float]:
    """Returns the times, by step, of a remote run's checkpoints that are not here."""
    path = folder / _ELSEWHERE
    written = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return {int(step): time for step, time in written.items()}


def write_elsewhere(folder: Path, times: Mapping[int, float]) -> None:
    """Notes the checkpoints of a remote run that are not here, by step."""
    if times or (folder / _ELSEWHERE).exists():
        atomic_write(folder / _ELSEWHERE, json.dumps(times))


def remove_step(folder: Path, step: int) -> None:
    """Removes the checkpoint of a step, here or elsewhere."""
    remove(path_of(folder, step))
    others = elsewhere(folder)
    if others.pop(step, None) is not None:
        write_elsewhere(folder, others)


def remove(path: Path) -> None:
    """Removes a checkpoint; whoever looks finds it whole or not at all."""
    if path.exists():
        aside = path.with_name(f"{_WRITING}gone-{path.name}-{os.getpid()}")
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def set_aside(folder: Path, step: int) -> Path:
    """Moves a damaged checkpoint out of the way and returns where it is now."""
    at = path_of(folder, step)
    number = 0
    while (target := folder / f"damaged-{number}-{at.name}").exists():
        number += 1
    at.rename(target)
    return target


def sweep(folder: Path) -> None:
    """Removes what killed processes have left half written."""
    for path in folder.glob(f"{_WRITING}*"):
        discard(path)


def discard(path: Path) -> None:
    """Removes a folder or a file, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def atomic_write(path: Path, content: str | bytes) -> None:
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


def steps_to_delete(
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
    >>> steps_to_delete(times, keep=1)
    [1, 2, 3]
    >>> steps_to_delete(times, keep=1, keep_hours=1)
    [2]

    Args:
        times: Time at which the checkpoint of each step was written, in seconds.
        keep: Number of the last that stay.
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


def is_disk_full(error: Exception) -> bool:
    """Returns whether an error says that a disk, or a quota of it, has no room left."""
    import tensorflow as tf

    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    # TensorFlow has one kind of error for all that is used up.
    return isinstance(error, tf.errors.ResourceExhaustedError) and any(
        os.strerror(number) in error.message for number in _NO_ROOM
    )
