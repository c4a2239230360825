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
from trainer.hyperparams import HyperparameterError, field

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
    classes: int | None = field(
        default=None,
        at_least=2,
        help="Number of classes; None: of the folders, of an npz file's labels.",
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

        # Folders have no numbers of their own, so theirs begin at 0.
        first = 0 if self.class_names() else self.first_label
        return Class(self.num_classes, first=first)

    @property
    def num_classes(self) -> int:
        """Number of classes: as said, or as the files have.

        Raises:
            HyperparameterError: If the files do not say it, or say another.
        """
        if self.files is None:
            return self.classes or digits.NUM_CLASSES
        names = self.class_names()
        if names is not None:
            return self._num_folders(names)
        if self.classes is not None:
            return self.classes
        paths = [] if self.format == "tfds" else _paths("files", self.files)
        if not paths or self._kind(paths) != "npz":
            raise HyperparameterError(
                "data.classes: expected the number of classes, which folders and .npz "
                "files say by themselves; received None for other files. Give "
                "--set=data.classes=N."
            )
        arrays = [_read_npz(path, **self._keys("npz")) for path in paths]
        return max(int(labels.max()) for _, labels in arrays) - self.first_label + 1

    def class_names(self) -> list[str] | None:
        """Returns the names of the folders of training; None where there are none."""
        if self.files is None or self.format == "tfds":
            return None
        paths = _paths("files", self.files)
        if self._kind(paths) != "folders":
            return None
        return sorted({path.parent.name for path in paths})

    def labels(self) -> list[str]:
        """Returns how the files call each class: by a folder's name, or a number."""
        names = self.class_names()
        if names is not None:
            return names
        return [str(self.first_label + i) for i in range(self.num_classes)]

    def _num_folders(self, names: list[str]) -> int:
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        if self.classes not in (None, len(names)):
            raise HyperparameterError(
                f"data.classes: expected {len(names)}, the number of folders in "
                f"{self.files} ({listed}); received {self.classes}. Leave it out."
            )
        if len(names) < 2:
            raise HyperparameterError(
                "data.files: expected images in at least 2 folders, one for each "
                f"class; received {listed} alone in {self.files}."
            )
        return len(names)

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
        kind = self._kind(paths)
        if kind == "folders":
            # Labels are those of training, so that a folder may be absent elsewhere.
            return Folders(paths, labels=self.class_names() or [])
        if kind == "npz":
            return Joined([_arrays(path, **self._keys(kind)) for path in paths])
        return Joined([TfRecords(path, **self._keys(kind)) for path in paths])

    def _kind(self, paths: list[Path]) -> str:
        """Returns what files are: as said, or by the suffix of the first."""
        if self.format != "auto":
            return self.format
        suffix = paths[0].suffix.lower()
        if suffix == ".npz":
            return "npz"
        # TFRecord files are as often named `train-00000-of-01024`, without a suffix.
        return "folders" if suffix in _IMAGES else "tfrecord"

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


def _arrays(path: Path, *, image_key: str, label_key: str) -> Source:
    from params.records import Arrays

    pixels, labels = _read_npz(path, image_key=image_key, label_key=label_key)
    return Arrays(pixels, labels, name=str(path))


def _read_npz(
    path: Path, *, image_key: str, label_key: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images and the labels of a file, which are integers.

    Raises:
        HyperparameterError: If it has no such arrays.
    """
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
    return pixels, _whole(labels, path, label_key)


def _whole(labels: np.ndarray, path: Path, label_key: str) -> np.ndarray:
    """Returns labels as integers.

    Raises:
        HyperparameterError: If one is none.
    """
    if labels.dtype.kind in "biu":
        return labels.astype(np.int64)
    if labels.dtype.kind != "f":
        raise HyperparameterError(
            f"data.files: expected integers as labels; received {label_key!r} of type "
            f"{labels.dtype} in {path}."
        )
    wrong = np.flatnonzero(~np.isfinite(labels) | (labels % 1 != 0))
    if len(wrong):
        raise HyperparameterError(
            f"data.files: expected integers as labels; received {labels[wrong[0]]} as "
            f"{label_key!r} of record {wrong[0]} in {path}, the first of "
            f"{len(wrong):,}."
        )
    return labels.astype(np.int64)
