"""Texts in files of records: JSON lines, Parquet, ArrayRecord, Hugging Face files.

A record is a document, under a key such as `text`; one of ArrayRecord is its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfgpipe_trainer import files
from tfgpipe_trainer.hyperparams import HyperparameterError

SUFFIXES = (".jsonl", ".parquet", ".array_record", ".arrayrecord", ".arrow")


def has_records(path: Path) -> bool:
    """Returns whether a file is one of records, by its suffix."""
    return path.suffix in SUFFIXES


def texts(path: Path, key: str) -> Iterator[bytes]:
    """Yields the text of each record, in UTF-8.

    Args:
        path: The file.
        key: The key, or column, of the text.

    Raises:
        HyperparameterError: If one has no text, or the file cannot be read.
    """
    found = _lines(path) if path.suffix == ".jsonl" else _texts_of_rows(path, key)
    for number, record in enumerate(found):
        text = record.get(key) if isinstance(record, dict) else record
        if isinstance(text, str):
            text = text.encode()
        if not isinstance(text, bytes):
            names = ", ".join(record) if isinstance(record, dict) else type(record)
            raise HyperparameterError(
                f"data.text_key: expected the key of a text in each record; received "
                f"{key!r} for record {number} of {path}, which has {names or 'none'}."
            )
        yield text


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise HyperparameterError(
                    f"data.files: expected a JSON object a line; received line "
                    f"{number + 1} of {path}: {error}."
                ) from None


def _texts_of_rows(path: Path, key: str) -> Iterator[Any]:
    if path.suffix == ".parquet":
        file = files.parquet(path)
        if key not in file.schema_arrow.names:
            raise HyperparameterError(
                f"data.text_key: expected a column of {path}, which has "
                f"{', '.join(file.schema_arrow.names)}; received {key!r}."
            )
        for batch in file.iter_batches(columns=[key]):
            yield from batch.column(0).to_pylist()
    elif path.suffix == ".arrow":
        yield from files.hugging_face(path)[key]
    else:
        reader = files.array_record(path)
        for number in range(reader.num_records()):
            yield from reader.read([number])
