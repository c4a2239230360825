"""The token ids of a text in a file, so that it is encoded once.

    words.json.tokens/
        5b1f....ids      ids, then the SHA-256 of the name and of them

The name is the SHA-256 of all that the ids are a function of: the tokenizer, its
package, how the text is cut, and the text itself. So no file is of another text, and a
damaged one is noticed. It may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.hyperparams import HyperparameterError

_CHECKSUM_BYTES = 32


def encoded(
    folder: Path,
    *,
    read: Callable[[], Iterable[bytes]],
    encode: Callable[[Iterable[bytes]], Iterable[np.ndarray]],
    version: str,
    dtype: np.dtype,
) -> np.ndarray:
    """Returns the ids of a text, which a file holds, `[num_tokens]`.

    Args:
        folder: The folder of cached files.
        read: Returns the parts of the text; each call reads it.
        encode: Returns the ids of parts, in arrays to be joined.
        version: All that the ids depend on beside the text.
        dtype: The type of ids.

    Raises:
        HyperparameterError: If the folder cannot be written to.
    """
    parts = _Hashed(read(), version)
    for _ in parts:
        pass
    path = folder / f"{parts.hexdigest()}.ids"
    ids = _read(path, dtype)
    if ids is None:
        print(f"Encoding the text; its tokens are kept in {folder}.", flush=True)
        # The text is read again, and may have changed: its name is found anew.
        parts = _Hashed(read(), version)
        try:
            path = _write(folder, encode(parts), parts, dtype)
        except OSError as error:
            raise HyperparameterError(
                "data.tokenizer: expected a file in a folder that can be written to, "
                f"where the tokens of the text are kept; {folder} cannot: "
                f"{error.strerror}. Copy the tokenizer to another folder."
            ) from None
        ids = _read(path, dtype)
        if ids is None:
            raise OSError(f"{path} is damaged as soon as it is written.")
        print(f"The text has {len(ids):,} tokens, {parts.size:,} bytes.", flush=True)
    return ids


class _Hashed:
    """Parts of a text, hashed as they are read."""

    def __init__(self, parts: Iterable[bytes], version: str) -> None:
        self.size = 0
        self._parts = parts
        self._hash = hashlib.sha256(version.encode())

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            self.size += len(part)
            # Their lengths say where parts end.
            self._hash.update(len(part).to_bytes(8, "little"))
            self._hash.update(part)
            yield part

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _write(
    folder: Path, arrays: Iterable[np.ndarray], parts: _Hashed, dtype: np.dtype
) -> Path:
    """Writes a file beside its place, then renames it there; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    # Hosts may share the folder.
    aside = folder / f"{socket.gethostname()}-{os.getpid()}.writing"
    try:
        content = hashlib.sha256()
        with aside.open("wb") as file:
            for array in arrays:
                data = array.astype(dtype, copy=False).tobytes()
                content.update(data)
                file.write(data)
            path = folder / f"{parts.hexdigest()}.ids"
            file.write(_checksum(path, content.digest()))
        store.flush(aside)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def _checksum(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()


def _read(path: Path, dtype: np.dtype) -> np.ndarray | None:
    """Returns the ids of a file as the disk has them; None: of none, or damaged."""
    if not path.exists():
        return None
    if path.stat().st_size >= _CHECKSUM_BYTES:
        file = np.asarray(np.memmap(path, np.uint8, mode="r"))
        data, checksum = file[:-_CHECKSUM_BYTES], file[-_CHECKSUM_BYTES:]
        if checksum.tobytes() == _checksum(path, hashlib.sha256(data.data).digest()):
            return data.view(dtype)
    print(f"{path} is damaged.", flush=True)
    return None
