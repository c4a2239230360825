"""Handwritten digits: 1,797 scanned images of 8 x 8 pixels, in scikit-learn itself.

UCI's "Optical Recognition of Handwritten Digits", its test part (Kaynak 1995).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal

import numpy as np

from tfgpipe_params.image.images import ClassificationData
from tfgpipe_trainer.hyperparams import HyperparameterError, field

if TYPE_CHECKING:
    from tfgpipe_params.image.sources import Source
    from tfgpipe_trainer.experiment import Split

Part = Literal["train", "validation", "test"]

NUM_CLASSES = 10
SHAPE = (8, 8, 1)
# The cut is the same for every seed, so that results of seeds can be compared.
_SIZES: dict[Part, int] = {"train": 1077, "validation": 240, "test": 480}


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images with their labels.

    Attributes:
        pixels: From 0 to 1, `[num_images, 8, 8, 1]` of type float32.
        labels: Digits, `[num_images]` of type int32.
    """

    pixels: np.ndarray
    labels: np.ndarray


@functools.cache
def read(part: Part) -> Digits:
    """Returns one part of the images, shuffled before they were cut.

    Raises:
        HyperparameterError: If scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise HyperparameterError(
            "params: expected scikit-learn, which holds the images; received an "
            "environment without. `pip install scikit-learn` brings it."
        ) from None
    pixels, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    ends = np.cumsum([0, *_SIZES.values()])
    number = list(_SIZES).index(part)
    chosen = order[ends[number] : ends[number + 1]]
    return Digits(
        (pixels[chosen] / 16).reshape(-1, *SHAPE).astype(np.float32),
        labels[chosen].astype(np.int32),
    )


class DigitImages(ClassificationData):
    """Labelled images, by default these digits.

    Without `validation_files` every tenth image is for validation.
    """

    files: str | None = field(
        default=None, help="Glob of files, folder, or tfds name; None: digits."
    )

    @property
    def num_classes(self) -> int:
        """Number of classes: as said, or as the files have."""
        if self.files is None:
            return self.classes or NUM_CLASSES
        return super().num_classes

    def source(self, split: Split) -> Source:
        """Returns the images of a split, none of them read yet."""
        from tfgpipe_params.image.sources import Arrays

        if self.files is not None:
            return super().source(split)
        images = read(split)
        return Arrays(images.pixels, images.labels, name="digits")
