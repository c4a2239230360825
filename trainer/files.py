"""Files of this machine and of others: `data/x.txt`, `s3://bucket/x.txt`.

Those of others are read by fsspec, which has a driver for each scheme: s3fs for `s3://`,
gcsfs for `gs://`, pyarrow for `hdfs://`.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tfgpipe_trainer.hyperparams import HyperparameterError


def json_lines(path: Path) -> Iterator[Any]:
    """Yields the values of a file's lines of JSON, without those that were torn."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def is_remote(path: str) -> bool:
    """Returns whether a path has a scheme, as `gs://bucket/folder`."""
    return re.match("[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def to_path(path: str, *, name: str) -> Path:
    """Returns a path that can be read, of whatever machine; `~` is the home directory.

    Args:
        path: The path.
        name: The hyperparameter that has it, which an error names.

    Raises:
        HyperparameterError: If its scheme has no driver.
    """
    if not is_remote(path):
        return Path(path).expanduser()
    from upath import UPath

    try:
        found: Any = UPath(path)
        if not found.protocol:  # `x://` is taken for a drive of Windows.
            raise ValueError("it has no scheme of two letters or more")
        found.fs  # noqa: B018  # It is made when it is asked for.
    except (ImportError, ValueError) as error:
        raise HyperparameterError(no_driver(name, path, error)) from None
    return found


def cache_folder() -> Path:
    """Returns the folder of this machine for copies of what is elsewhere."""
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(above).expanduser() / "tfgpipe"


def kept_beside(path: str, suffix: str) -> Path:
    """Returns a folder of this machine for what is computed from a file.

    Args:
        path: The file, beside which it is unless that is remote.
        suffix: The end of the folder's name.
    """
    if not is_remote(path):
        return Path(f"{path}{suffix}").expanduser()
    digest = hashlib.sha256(path.encode()).hexdigest()[:16]
    return cache_folder() / f"{digest}{suffix}"


def no_driver(name: str, path: str, error: Exception) -> str:
    """Returns the message about a path whose scheme has no driver."""
    return (
        f"{name}: expected a path of a scheme that fsspec has a driver for; received "
        f"{path!r}: {error}."
    )


def matching_files(name: str, pattern: str, *, example: str) -> list[Path]:
    """Returns the files that a glob matches, in the order of their names.

    Args:
        name: The hyperparameter that says it, which errors name.
        pattern: The glob; `~` is the home directory, `**` any folders, among them
            links. A file that is found by several paths counts once.
        example: A glob that an error shows.

    Raises:
        HyperparameterError: If there is none, or it cannot be asked for.
    """
    found = _remote(name, pattern) if is_remote(pattern) else _local(pattern)
    if not found:
        raise HyperparameterError(
            f"{name}: expected a glob that matches files, such as {example!r}; "
            f"received {pattern!r}, which matches none."
        )
    return found


def _remote(name: str, pattern: str) -> list[Path]:
    root: Any = to_path(pattern, name=name)
    try:
        found = root.fs.glob(root.path, detail=True)
    except OSError as error:
        raise HyperparameterError(
            f"{name}: expected files that can be listed; received {pattern!r}: {error}."
        ) from None
    files = sorted(path for path, of in found.items() if of["type"] == "file")
    return [to_path(root.fs.unstrip_protocol(path), name=name) for path in files]


def _local(pattern: str) -> list[Path]:
    real = functools.cache(os.path.realpath)
    found: dict[tuple[str, str], Path] = {}
    for path in sorted(_expanded(os.path.expanduser(pattern))):
        if os.path.isfile(path):
            folder, name_there = os.path.split(path)
            found.setdefault((real(folder or "."), name_there), Path(path))
    return list(found.values())


def _expanded(pattern: str) -> Iterator[str]:
    """Yields the paths that a glob matches; `glob` follows circles of links in `**`."""
    anywhere = re.search(r"(?<![^/])\*\*(?:/+|$)", pattern)
    if anywhere is None:
        yield from glob.iglob(pattern)
        return
    head, rest = pattern[: anywhere.start()], pattern[anywhere.end() :] or "*"
    for root in glob.iglob(head) if head else [""]:
        for folder in _folders(root):
            yield from _expanded(os.path.join(glob.escape(folder), rest))


def _folders(root: str) -> Iterator[str]:
    """Yields a folder and those below it, each once, but those that are hidden.

    A link that leads above the first folder is not followed.
    """
    top = os.path.realpath(root or ".")
    folders, links, seen = [root], list[str](), set[str]()
    while folders or links:
        folder = folders.pop() if folders else links.pop()  # By a link only at last.
        real = os.path.realpath(folder or ".")
        above = real != top and f"{top}/".startswith(f"{real.rstrip('/')}/")
        if above or real in seen:
            continue
        seen.add(real)
        yield folder
        with contextlib.suppress(OSError):  # What nobody may read matches nothing.
            for name in sorted(os.listdir(folder or "."), reverse=True):
                path = os.path.join(folder, name)
                if not name.startswith(".") and os.path.isdir(path):
                    (links if os.path.islink(path) else folders).append(path)


def _package(name: str, format_: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise HyperparameterError(
            f"data.files: expected the package {package} for files of {format_}; "
            f"received an environment without. Try: pip install {package}"
        ) from None


def _opened(path: Path, open_: Any, what: str) -> Any:
    try:
        return open_()
    except Exception as error:  # Each package has errors of its own.
        reason = str(error).partition("\n")[0]
        raise HyperparameterError(
            f"data.files: expected {what}; received {path}: {reason}."
        ) from None


def parquet(path: Path) -> Any:
    """Returns an open Parquet file of pyarrow's."""
    package = _package("pyarrow.parquet", "Parquet")
    # Read ahead it would use threads of its own, which wait for Python's.
    return _opened(
        path,
        lambda: package.ParquetFile(path.open("rb"), pre_buffer=False),
        "Parquet files",
    )


def hugging_face(path: Path) -> Any:
    """Returns a file of Hugging Face's `Dataset.save_to_disk`, opened."""
    package = _package("datasets", "Hugging Face")
    return _opened(
        path, lambda: package.Dataset.from_file(str(path)), "files of `save_to_disk`"
    )


def array_record(path: Path) -> Any:
    """Returns an ArrayRecord file's reader; such a file has some records."""
    package = _package("array_record.python.array_record_module", "ArrayRecord")
    reader = _opened(
        path, lambda: package.ArrayRecordReader(str(path)), "ArrayRecord files"
    )
    if not reader.num_records():  # So it says of other files as well.
        raise HyperparameterError(
            f"data.files: expected ArrayRecord files; received {path}, without records."
        )
    return reader
