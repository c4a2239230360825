"""Labelled images of TensorFlow Datasets, where that package is installed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from params.bad_records import BadRecordError
from params.records import Source, from_0_to_1
from trainer.hyperparams import HyperparameterError


class Tfds(Source):
    """A data set of TensorFlow Datasets, prepared for random access.

    Args:
        name: Its name and its split, such as `"mnist#train"`.
        image_key: The feature that is the image.
        label_key: The feature that is the label.
    """

    def __init__(self, name: str, *, image_key: str, label_key: str) -> None:
        self._name = name
        self._keys = (image_key, label_key)
        self._rows = _tfds_rows(name)

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, number: int) -> str:
        """Returns the data set, and the row."""
        return f"{self._name} record {number}"

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Returns a row."""
        row = self._rows[number]
        absent = [key for key in self._keys if key not in row]
        if absent:
            raise BadRecordError(
                f"expected {absent[0]!r} in it; received {', '.join(sorted(row))}"
            )
        image, label = (row[key] for key in self._keys)
        if not np.issubdtype(np.asarray(label).dtype, np.integer):
            raise BadRecordError(
                f"expected an integer {self._keys[1]!r} in it; received {label}"
            )
        return from_0_to_1(np.asarray(image)), int(label)


@functools.cache
def _tfds_rows(name: str) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise HyperparameterError(
            "data.format: expected the package tensorflow_datasets for 'tfds'; "
            "received an environment without. `pip install tensorflow-datasets` brings "
            "it; tfrecord, npz and folders do without."
        ) from None
    dataset, _, split = name.partition("#")
    try:
        return tfds.data_source(dataset, split=split or "train")
    except Exception as error:  # A class for each way in which it may fail.
        reason = str(error).strip().partition("\n")[0]
        raise HyperparameterError(
            f"data.files: expected a data set of TensorFlow Datasets, such as "
            f"'mnist#train'; received {name!r}: {reason}"
        ) from None
