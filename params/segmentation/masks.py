"""Masks: a class in every pixel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfgpipe_params.image.formats import read_file, read_image
from tfgpipe_params.image.image_examples import Target
from tfgpipe_params.image.sources import BadRecordError, Source, from_0_to_1


@dataclasses.dataclass(frozen=True)
class Mask(Target):
    """A class for every pixel, in the size that images are brought to.

    Attributes:
        size: Height and width.
        classes: Number of classes, from 0.
        ignored: A number of pixels that are of none, if there is one.
    """

    size: tuple[int, int]
    classes: int
    ignored: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Height and width."""
        return self.size

    def read(self, label: Any) -> np.ndarray:
        """Returns a mask of the size, each pixel being its nearest one's class."""
        wrong = (label < 0) | (label >= self.classes)
        if self.ignored is not None:
            wrong &= label != self.ignored
        if wrong.any():
            also = "" if self.ignored is None else f", or {self.ignored}"
            raise BadRecordError(
                f"expected pixels of its mask from 0 to {self.classes - 1}{also}, as "
                f"data.classes and data.ignore_class say; received {label[wrong][0]}"
            )
        rows, columns = (
            ((np.arange(new) + 0.5) * old / new).astype(int)
            for new, old in zip(self.size, label.shape, strict=True)
        )
        return label[np.ix_(rows, columns)].astype(np.int32)


class Masked(Source):
    """Image files, and for each a file of one channel, a class in every pixel.

    Args:
        pairs: The files of images, with those of their masks.
    """

    def __init__(self, pairs: Sequence[tuple[Path, Path]]) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def name(self, number: int) -> str:
        """Returns the image's file."""
        return str(self._pairs[number][0])

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a decoded image, and its decoded mask."""
        image, mask = (read_image(read_file(path)) for path in self._pairs[number])
        if mask.shape != (*image.shape[:2], 1):
            raise BadRecordError(
                f"expected a mask of {list(image.shape[:2])} pixels as the image, each "
                "the number of its class, in one channel; received "
                f"{list(mask.shape)} in {self._pairs[number][1]}"
            )
        return from_0_to_1(image), mask[..., 0].astype(np.int32)
