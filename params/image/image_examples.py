"""Images brought to one shape, each with a class or a mask; bad ones are replaced.

What replaces a bad one is the next good one of the source, whoever comes across it
first, so a batch stays a function of its step.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np

from tfgpipe_params.image.sources import BadRecordError, BadRecords, Source
from tfgpipe_trainer.batches import Examples
from tfgpipe_trainer.hyperparams import HyperparameterError


class Target(abc.ABC):
    """A kind of target of an image."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one."""

    @abc.abstractmethod
    def read(self, label: Any) -> np.ndarray:
        """Returns a source's label as training reads it, of type int32.

        Raises:
            BadRecordError: If it is none.
        """


@dataclasses.dataclass(frozen=True)
class Class(Target):
    """One class, counted from 0.

    Attributes:
        classes: Number of classes.
        first: The label of the first.
    """

    classes: int
    first: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """A number."""
        return ()

    def read(self, label: Any) -> np.ndarray:
        """Returns the class of a label."""
        found = label - self.first
        if not 0 <= found < self.classes:
            raise BadRecordError(
                f"expected a label from {self.first} to {self.first + self.classes - 1}"
                f", as data.first_label and data.classes say; received {label}"
            )
        return np.asarray(found, np.int32)


Example = tuple[np.ndarray, np.ndarray]

# How bright red, green and blue are: ITU-R BT.601.
_LUMA = np.array([[0.299], [0.587], [0.114]], np.float32)


class ImageExamples(Examples):
    """The images of a source, brought to one shape, bad ones replaced.

    Args:
        source: The images.
        shape: Height, width, channels that they are brought to.
        target: The target of each image.
        bad: Counts those that cannot be used.
        cache: True to keep in memory what has been read.
    """

    def __init__(
        self,
        source: Source,
        *,
        shape: tuple[int, int, int],
        target: Target,
        bad: BadRecords,
        cache: bool = False,
    ) -> None:
        self._source = source
        self._shape = shape
        self._target = target
        self.bad = bad
        self._kept: dict[int, Example] | None = {} if cache else None
        self._instead: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._source)

    def name(self, number: int) -> str:
        """Names a record that has been read: its file, its number there.

        That is the name of the record that was read in place of a bad one.
        """
        return self._source.name(self._instead.get(number, number))

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns a batch of examples."""
        read = [self.read(index) for index in indices.tolist()]
        pixels, targets = zip(*read, strict=True)
        return np.stack(pixels), np.stack(targets)

    def read(self, number: int) -> Example:
        """Returns pixels from 0 to 1 of the shape, and what stands beside them.

        Raises:
            HyperparameterError: If there are too many bad records.
        """
        if self._kept is not None and number in self._kept:
            return self._kept[number]
        example = self._read(number)
        if self._kept is not None:
            self._kept[number] = example
        return example

    def _read(self, number: int) -> Example:
        for step in range(len(self)):
            other = (number + step) % len(self)
            try:
                pixels, label = self._source.read(other)
                example = _fitted(pixels, self._shape), self._target.read(label)
            except BadRecordError as error:
                self.bad.add(self._source.name(other), str(error))
                continue
            if step:
                self._instead[number] = other
            return example
        raise HyperparameterError(
            f"data.files: expected records that can be used; received {len(self)} of "
            "which none can.\n" + "".join(f"  {line}\n" for line in self.bad.first)
        )


def _fitted(pixels: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Returns pixels with the channels and the size of a shape."""
    height, width, channels = shape
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or not pixels.size:
        raise BadRecordError(
            "expected pixels as [height, width, channels], 1, 3 or 4 channels; "
            f"received {list(pixels.shape)}"
        )
    colors = pixels[..., :3]  # A fourth channel is how opaque they are.
    if channels == 1 and colors.shape[2] == 3:
        colors = colors @ _LUMA
    if colors.shape[2] != channels:
        colors = np.repeat(colors, channels, axis=2)
    if colors.shape[:2] != (height, width):
        import tensorflow as tf

        with tf.device("CPU:0"):  # An accelerator has the model to compute.
            colors = tf.image.resize(colors, [height, width], antialias=True).numpy()
    return colors
