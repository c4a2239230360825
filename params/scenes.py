"""Images with the class of every pixel: a user's own files, or made by the program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from params import files, shapes
from params.pictures import Pictures
from trainer.hyperparams import HyperparameterError, field

if TYPE_CHECKING:
    from params.records import Source
    from params.targets import Target


class Scenes(Pictures):
    """Images with masks, by default of shapes that the program draws.

    An image and its mask have one name but for folder and suffix. A mask has one
    channel, whose pixels are numbers of classes. Without `validation_files` every tenth
    image is for validation.
    """

    files: str | None = field(
        default=None, help="Glob of your images; None: made by the program."
    )
    masks: str | None = field(
        default=None, help="Glob of their masks, of the same names: PNG of one channel."
    )
    validation_masks: str | None = field(
        default=None, help="Masks of those; None: they are among `masks`."
    )
    classes: int = field(default=len(shapes.CLASSES), at_least=2, help="How many.")
    ignored: int | None = field(
        default=None, at_least=0, help="Number of pixels that count for nothing."
    )
    shape: tuple[int, int, int] = field(
        default=(32, 32, 1), help="Height, width, channels that images are brought to."
    )
    num_shapes: int = field(
        default=3, at_least=1, help="Most shapes in an image that is made."
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
        if self.files is None and self.classes != len(shapes.CLASSES):
            raise HyperparameterError(
                f"classes: expected {len(shapes.CLASSES)}, which images that are made "
                f"have; received {self.classes}. Or give data.files."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """What the classes are called."""
        if self.files is None:
            return shapes.CLASSES
        return tuple(f"class {number}" for number in range(self.classes))

    def target(self) -> Target:
        """Returns what stands beside each image: its mask."""
        from params.targets import Mask

        height, width, _ = self.shape
        return Mask((height, width), classes=self.classes, ignored=self.ignored)

    def records(self, name: str, pattern: str) -> Source:
        """Returns the images of some files, with their masks."""
        from params.image_files import Masked

        return Masked(self._pairs(name, pattern))

    def _pairs(self, name: str, pattern: str) -> list[tuple[Path, Path]]:
        """Returns each image with its mask."""
        theirs = "masks"
        if name == "validation_files" and self.validation_masks is not None:
            theirs = "validation_masks"
        images = files.matching(f"data.{name}", pattern, example="images/*.jpg")
        masks = files.matching(
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
