"""Images with masks: files of the user's, or shapes that the program draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tfgpipe_params.image.images import ImageData
from tfgpipe_params.segmentation import shapes
from tfgpipe_trainer import files
from tfgpipe_trainer.hyperparams import HyperparameterError, field

if TYPE_CHECKING:
    from tfgpipe_params.image.image_examples import Target
    from tfgpipe_params.image.sources import Source


class SegmentationData(ImageData):
    """Images with masks, by default of shapes that the program draws.

    An image and its mask have one name but for folder and suffix. A mask has one
    channel, whose pixels are numbers of classes. Without `validation_files` every tenth
    image is for validation.
    """

    files: str | None = field(
        default=None, help="Glob of image files; None: generated shapes."
    )
    masks: str | None = field(
        default=None, help="Glob of their masks: PNG, one channel, same names."
    )
    validation_masks: str | None = field(
        default=None, help="Masks of validation_files; None: among `masks`."
    )
    classes: int = field(
        default=len(shapes.SHAPES),
        at_least=2,
        less_than=2**24,
        help="Number of classes.",
    )
    ignore_class: int | None = field(
        formerly="ignored",
        default=None,
        at_least=0,
        help="Class of pixels that the loss ignores.",
    )
    shape: tuple[int, int, int] = field(
        default=(32, 32, 1), help="Height, width, channels that images are resized to."
    )
    num_shapes: int = field(
        default=3, at_least=1, help="Maximum number of shapes in a generated image."
    )

    def validate(self) -> None:
        """Checks that what is given fits together."""
        super().validate()
        height, width, channels = self.shape
        if (self.files is None) != (self.masks is None):
            absent = "files" if self.files is None else "masks"
            raise HyperparameterError(
                f"{absent}: expected a glob, as files and masks go together; received "
                "None."
            )
        if self.files is None and (height != width or channels != 1):
            raise HyperparameterError(
                "shape: expected as much height as width, and 1 channel, which images "
                f"that are made have; received {self.shape}. Or give data.files."
            )
        if self.files is None and self.classes != len(shapes.SHAPES):
            raise HyperparameterError(
                f"classes: expected {len(shapes.SHAPES)}, which images that are "
                f"made have; received {self.classes}. Or give data.files."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes."""
        if self.files is None:
            return shapes.SHAPES
        return tuple(f"class {number}" for number in range(self.classes))

    def target(self) -> Target:
        """Returns the target of each image: its mask."""
        from tfgpipe_params.segmentation.masks import Mask

        height, width, _ = self.shape
        return Mask((height, width), classes=self.classes, ignored=self.ignore_class)

    def records(self, name: str, pattern: str) -> Source:
        """Returns the images of some files, with their masks."""
        from tfgpipe_params.segmentation.masks import Masked

        return Masked(self._pairs(name, pattern))

    def _pairs(self, name: str, pattern: str) -> list[tuple[Path, Path]]:
        """Returns each image with its mask."""
        theirs = "masks"
        if name == "validation_files" and self.validation_masks is not None:
            theirs = "validation_masks"
        images = files.matching_files(f"data.{name}", pattern, example="images/*.jpg")
        masks = files.matching_files(
            f"data.{theirs}", str(getattr(self, theirs)), example="masks/*.png"
        )
        by_name = {path.stem: path for path in masks}
        if len(by_name) < len(masks):
            raise HyperparameterError(
                f"data.{theirs}: expected masks of names that differ; received "
                f"{len(masks)} of {len(by_name)} names."
            )
        without = [path for path in images if path.stem not in by_name]
        if without:
            raise HyperparameterError(
                f"data.{theirs}: expected a mask for each image, of the same name but "
                f"for its suffix; received none for {len(without)} of {len(images)}, "
                f"such as {without[0]}."
            )
        return [(path, by_name[path.stem]) for path in images]
