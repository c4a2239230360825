"""Tensors by name, in files: those of a checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from trainer.devices import here

_PREFIX = "state"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def write(folder: Path, tensors: Mapping[str, tf.Tensor]) -> None:
    """Writes tensors to a folder.

    Raises:
        tf.errors.OpError: If that fails.
    """
    with tf.device(here()):
        tf.raw_ops.SaveV2(
            prefix=str(folder / _PREFIX),
            tensor_names=list(tensors),
            shape_and_slices=[""] * len(tensors),
            tensors=list(tensors.values()),
        )


def read(folder: Path) -> dict[str, np.ndarray]:
    """Returns the tensors in a folder, by name."""
    reader = tf.train.load_checkpoint(str(folder / _PREFIX))
    return {name: reader.get_tensor(name) for name in shapes(folder)}


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in a folder, by name."""
    reader = tf.train.load_checkpoint(str(folder / _PREFIX))
    found = reader.get_variable_to_shape_map()
    return {name: tuple(found[name]) for name in sorted(found)}


def is_disk_full(error: Exception) -> bool:
    """Returns whether an error says that a disk, or a quota of it, has no room left."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    # TensorFlow has one kind of error for all that is used up.
    return isinstance(error, tf.errors.ResourceExhaustedError) and any(
        os.strerror(number) in error.message for number in _NO_ROOM
    )
