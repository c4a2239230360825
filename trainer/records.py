"""Files of records: Parquet, ArrayRecord, datasets of Hugging Face on disk.

Texts in them are read by `tfgpipe_params.lm.texts`, images by
`tfgpipe_params.image.records`; each package is needed for files of its own kind alone.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from tfgpipe_trainer.hyperparams import HyperparameterError


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
    return _opened(path, lambda: package.ParquetFile(path.open("rb")), "Parquet files")


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
