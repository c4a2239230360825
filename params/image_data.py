"""Which labelled images an experiment trains on: a user's own, or scikit-learn's."""

from __future__ import annotations

import glob
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from params import digits, files
from params.pictures import Pictures
from tfgpipe.hyperparams import HyperparameterError, field

if TYPE_CHECKING:
    from params.experiment import Split
    from params.records import Source
    from params.targets import Target

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif"}
# Features as they are usually named, of the image and of the label.
_KEYS = {
    "tfrecord": ("image/encoded", "image/class/label"),
    "npz": ("x", "y"),
    "tfds": ("image", "label"),
}


class Images(Pictures):
    """Labelled images, by default scikit-learn's handwritten digits.

    Without `validation_files` every tenth image is for validation.
    """

    files: str | None = field(
        default=None, help="Glob of your files, a folder, a tfds name; None: digits."
    )
    format: Literal["auto", "tfrecord", "npz", "folders", "tfds"] = field(
        default="auto", help="What `files` are; folders: LABEL/NAME.png."
    )
    image_key: str | None = field(
        default=None, help="Name of the image in a record; None: the format's usual."
    )
    label_key: str | None = field(
        default=None, help="Name of the label in a record; None: the format's usual."
    )
    first_label: int = field(
        default=0, at_least=0, help="Label of the first class: 1 in ImageNet's files."
    )

    def target(self) -> Target:
        """Returns what stands beside each image: its class."""
        from params.targets import Class

        return Class(self.classes, first=self.first_label)

    def source(self, split: Split) -> Source:
        """Returns the images of a split, none of them read yet."""
        from params.records import Arrays

        if self.files is not None:
            return super().source(split)
        images = digits.read(split)
        return Arrays(images.pixels, images.labels, name="digits")

    def records(self, name: str, pattern: str) -> Source:
        """Returns the images of some files."""
        from params.image_files import Folders, TfRecords
        from params.records import Joined
        from params.tfds import Tfds

        if self.format == "tfds":
            return Tfds(pattern, **self._keys("tfds"))
        paths = _paths(name, pattern)
        kind = _kind(paths) if self.format == "auto" else self.format
        if kind == "folders":
            # Labels are those of training, so that a folder may be absent elsewhere.
            training = _paths("files", str(self.files))
            labels = sorted({path.parent.name for path in training})
            return Folders(paths, labels=labels)
        if kind == "npz":
            return Joined([_arrays(path, **self._keys(kind)) for path in paths])
        return Joined([TfRecords(path, **self._keys(kind)) for path in paths])

    def _keys(self, kind: str) -> dict[str, str]:
        image, label = _KEYS[kind]
        return {
            "image_key": self.image_key or image,
            "label_key": self.label_key or label,
        }


def _paths(name: str, pattern: str) -> list[Path]:
    if os.path.isdir(os.path.expanduser(pattern)):
        pattern = os.path.join(glob.escape(pattern), "*", "*")
    return files.matching(f"data.{name}", pattern, example="images/*/*.png")


def _kind(paths: list[Path]) -> Literal["npz", "folders", "tfrecord"]:
    """Returns what files are, by the suffix of the first."""
    suffix = paths[0].suffix.lower()
    if suffix == ".npz":
        return "npz"
    # TFRecord files are as often named `train-00000-of-01024`, without a suffix.
    return "folders" if suffix in _IMAGES else "tfrecord"


def _arrays(path: Path, *, image_key: str, label_key: str) -> Source:
    from params.records import Arrays

    try:
        with np.load(path) as arrays:
            names = ", ".join(arrays) or "none"
            pixels, labels = arrays.get(image_key), arrays.get(label_key)
    except (
        OSError,
        ValueError,
        EOFError,
        zipfile.BadZipFile,
    ) as error:  # What numpy raises of others.
        raise HyperparameterError(
            f"data.files: expected .npz files; received {path}: {error}"
        ) from None
    if pixels is None or labels is None:
        raise HyperparameterError(
            f"data.files: expected arrays {image_key!r} and {label_key!r}; received "
            f"{path}, which has {names}. Others are named by data.image_key and "
            "data.label_key."
        )
    if pixels.ndim not in (3, 4) or labels.shape != pixels.shape[:1] or not labels.size:
        raise HyperparameterError(
            "data.files: expected images as [N, height, width] or [N, height, width, "
            f"channels], and N labels; received {list(pixels.shape)} and "
            f"{list(labels.shape)} in {path}."
        )
    return Arrays(pixels, labels, name=str(path))
