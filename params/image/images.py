"""Images of the user's, labelled: their files, formats and classes."""

from __future__ import annotations

import abc
import functools
import glob
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tfgpipe_params.image import sources
from tfgpipe_trainer import files
from tfgpipe_trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    from tfgpipe_params.image.image_examples import ImageExamples, Target
    from tfgpipe_params.image.sources import Source
    from tfgpipe_trainer.experiment import Split


class Augmentation(Hyperparams):
    """Augmentation of images in training, each row by draws of its own."""

    shift: int = field(
        default=0, at_least=0, help="Maximum random shift in pixels, each way."
    )
    flip: Literal["none", "horizontal"] = field(default="none", help="Random flips.")

    def apply(
        self, pixels: np.ndarray, *, rows: slice, batch_size: int, seed: int, step: int
    ) -> np.ndarray:
        """Returns images changed, `[num_rows, height, width, channels]`.

        Args:
            pixels: The images, of the same shape.
            rows: Their rows in the batch.
            batch_size: Rows of the whole batch.
            seed: The seed.
            step: The step.
        """
        # The counter keeps these draws apart from those of `batches`.
        bits = np.random.Philox(key=[seed, step], counter=[0, 0, 0, 1])
        draws = bits.random_raw(3 * batch_size).reshape(3, batch_size)[:, rows]
        if self.flip == "horizontal":
            flipped = draws[0] % 2 == 1
            pixels = np.where(flipped[:, None, None, None], pixels[:, :, ::-1], pixels)
        if self.shift:
            pixels = self._moved(pixels, *(draws[1:] % (2 * self.shift + 1)))
        return pixels

    def _moved(
        self, pixels: np.ndarray, down: np.ndarray, right: np.ndarray
    ) -> np.ndarray:
        """Returns images moved, what comes in from outside being zero."""
        _, height, width, _ = pixels.shape
        around = (self.shift, self.shift)
        margin = np.pad(pixels, [(0, 0), around, around, (0, 0)])
        moved = np.empty_like(pixels)
        for row, (i, j) in enumerate(zip(down, right, strict=True)):
            moved[row] = margin[row, i : i + height, j : j + width]
        return moved


class ImageData(Hyperparams, abc.ABC):
    """Images, those of validation named as well, or every tenth."""

    files: str | None = field(default=None, help="Glob of image files.")
    validation_files: str | None = field(
        default=None, help="Files for validation; None: every tenth of `files`."
    )
    shape: tuple[int, int, int] = field(
        default=(8, 8, 1), help="Height, width, channels that images are resized to."
    )
    max_bad_records: int = field(
        default=10,
        at_least=0,
        help="Maximum number of unusable records; ten are named.",
    )
    cache: Literal["none", "memory"] = field(
        default="none", help="memory: keep decoded images."
    )

    def validate(self) -> None:
        """Checks the shape."""
        if min(self.shape) < 1 or self.shape[2] not in (1, 3):
            raise HyperparameterError(
                "shape: expected height and width of at least 1, and 1 or 3 channels; "
                f"received {self.shape}."
            )

    @abc.abstractmethod
    def target(self) -> Target:
        """Returns the target of each image."""

    @abc.abstractmethod
    def records(self, name: str, pattern: str) -> Source:
        """Returns the images of some files.

        Args:
            name: The hyperparameter that names them.
            pattern: The glob.

        Raises:
            HyperparameterError: If there is none, or they are of no known kind.
        """

    def source(self, split: Split) -> Source:
        """Returns the images of a split, none of them read yet."""
        from tfgpipe_params.image.sources import every_tenth

        if self.files is None:
            raise HyperparameterError(
                "data.files: expected a glob of image files, such as 'images/*/*.png'; "
                "received None."
            )
        own = self.files
        if self.validation_files is None:
            return every_tenth(self.records("files", own), split)
        if split == "train":
            return self.records("files", own)
        return self.records("validation_files", self.validation_files)

    def open(self, split: Split) -> ImageExamples:
        """Returns the images of a split, the first of them read.

        Raises:
            HyperparameterError: If there is none, or none that can be used.
        """
        from tfgpipe_params.image.image_examples import ImageExamples

        examples = ImageExamples(
            self.source(split),
            shape=self.shape,
            target=self.target(),
            bad=self._bad_records,
            cache=self.cache == "memory",
        )
        examples.read(0)
        return examples

    @functools.cached_property
    def _bad_records(self) -> sources.BadRecords:
        """The bad records of all splits of a run."""
        return sources.BadRecords(self.max_bad_records)


_FEW = 1000  # Classes that a file may have without an image of each.
_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif"}
# Features as they are usually named, of the image and of the label.
_KEYS = {
    "tfrecord": ("image/encoded", "image/class/label"),
    "npz": ("x", "y"),
    "tfds": ("image", "label"),
    "parquet": ("image", "label"),
    "arrow": ("image", "label"),
    "array_record": ("image/encoded", "image/class/label"),
}


class ClassificationData(ImageData):
    """Labelled images.

    Without `validation_files` every tenth image is for validation.
    """

    files: str | None = field(default=None, help="Glob of files, folder, or tfds name.")
    classes: int | None = field(
        default=None,
        at_least=2,
        less_than=2**24,
        help="Number of classes; None: from folders or npz labels.",
    )
    format: Literal[
        "auto",
        "tfrecord",
        "npz",
        "folders",
        "tfds",
        "parquet",
        "arrow",
        "array_record",
    ] = field(default="auto", help="Format of the files; folders: LABEL/NAME.png.")
    image_key: str | None = field(
        default=None, help="Feature of the image; None: the format's usual one."
    )
    label_key: str | None = field(
        default=None, help="Feature of the label; None: the format's usual one."
    )
    first_label: int = field(
        default=0, at_least=0, help="Label of the first class; 1 in ImageNet's files."
    )

    def target(self) -> Target:
        """Returns the target of each image: its class."""
        from tfgpipe_params.image.image_examples import Class

        # Folders have no numbers of their own, so theirs begin at 0.
        first = 0 if self.class_names() else self.first_label
        return Class(self.num_classes, first=first)

    @property
    def num_classes(self) -> int:
        """Number of classes: as said, or as the files have.

        Raises:
            HyperparameterError: If the files do not say it, or say another.
        """
        names = self.class_names()
        if names is not None:
            return self._num_folders(names)
        if self.classes is not None:
            return self.classes
        is_named = self.files is not None and self.format != "tfds"
        paths = _paths("files", str(self.files)) if is_named else []
        if not paths or self._kind(paths) != "npz":
            raise HyperparameterError(
                "data.classes: expected the number of classes, which folders and .npz "
                "files say by themselves; received None for other files. Give "
                "--set=data.classes=N."
            )
        labels = [_read_npz(path, **self._keys("npz"))[1] for path in paths]
        last, images = max(int(each.max()) for each in labels), sum(map(len, labels))
        classes = last - self.first_label + 1
        if classes > max(images, _FEW):
            raise HyperparameterError(
                "data.classes: expected the number of classes, as labels that say it "
                f"go up to the number of images, {images:,}; received None, and the "
                f"label {last}. Number the classes from data.first_label on, or give "
                "--set=data.classes=N."
            )
        return classes

    def class_names(self) -> list[str] | None:
        """Returns the names of the folders of training; None where there are none."""
        if self.files is None or self.format == "tfds":
            return None
        paths = _paths("files", self.files)
        if self._kind(paths) != "folders":
            return None
        return sorted({path.parent.name for path in paths})

    def labels(self) -> list[str]:
        """Returns each class as the files name it: by a folder's name, or a number."""
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

    def records(self, name: str, pattern: str) -> Source:
        """Returns the images of some files."""
        from tfgpipe_params.image.formats import Folders, Tfds, TfRecords
        from tfgpipe_params.image.sources import Joined

        if self.format == "tfds":
            return Tfds(pattern, **self._keys("tfds"))
        paths = _paths(name, pattern)
        kind = self._kind(paths)
        if kind == "folders":
            # Labels are those of training, so that a folder may be absent elsewhere.
            return Folders(paths, labels=self.class_names() or [])
        if kind == "npz":
            return Joined([_arrays(path, **self._keys(kind)) for path in paths])
        from tfgpipe_params.image import records

        source: Any = {
            "tfrecord": TfRecords,
            "parquet": records.ParquetImages,
            "arrow": records.HuggingFaceImages,
            "array_record": records.ArrayRecordImages,
        }[kind]
        return Joined([source(path, **self._keys(kind)) for path in paths])

    def _kind(self, paths: list[Path]) -> str:
        """Returns the format of the files: as given, or by the first one's suffix."""
        if self.format != "auto":
            return self.format
        suffix = paths[0].suffix.lower()
        known = {".npz": "npz", ".parquet": "parquet", ".arrow": "arrow"}
        known |= dict.fromkeys([".arrayrecord", ".array_record"], "array_record")
        if suffix in known:
            return known[suffix]
        # TFRecord files are as often named `train-00000-of-01024`, without a suffix.
        return "folders" if suffix in _IMAGES else "tfrecord"

    def _keys(self, kind: str) -> dict[str, str]:
        image, label = _KEYS[kind]
        return {
            "image_key": self.image_key or image,
            "label_key": self.label_key or label,
        }


def _paths(name: str, pattern: str) -> list[Path]:
    if files.to_path(pattern, name=f"data.{name}").is_dir():
        pattern = os.path.join(glob.escape(pattern), "*", "*")
    return files.matching_files(f"data.{name}", pattern, example="images/*/*.png")


def _arrays(path: Path, *, image_key: str, label_key: str) -> Source:
    from tfgpipe_params.image.sources import Arrays

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
        loaded = np.load(path.open("rb"))
        if isinstance(loaded, np.ndarray):
            raise ValueError("it is one array of numpy.save; numpy.savez writes .npz")
        with loaded as arrays:
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
    try:
        sources.check_pixels(pixels)
    except sources.BadRecordError as error:
        raise HyperparameterError(
            f"data.files: {error}. These are {image_key!r} in {path}."
        ) from None
    return pixels, _whole(labels, path, label_key)


def _whole(labels: np.ndarray, path: Path, label_key: str) -> np.ndarray:
    """Returns labels as integers.

    Raises:
        HyperparameterError: If one is none.
    """
    if labels.dtype.kind in "biu":
        if labels.max() > np.iinfo(np.int64).max:
            raise HyperparameterError(
                f"data.files: expected labels below 2**63; received {labels.max()} as "
                f"{label_key!r} in {path}."
            )
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
