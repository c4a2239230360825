"""What images of a user's own have in common, whatever is to be told of them."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Literal

from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    from params.experiment import Split
    from params.inputs import Examples
    from params.records import Source
    from params.targets import Target


class Pictures(Hyperparams, abc.ABC):
    """Images, those of validation named as well, or every tenth."""

    files: str | None = field(default=None, help="Glob of your images.")
    validation_files: str | None = field(
        default=None, help="As files, to validate on; None: every tenth of `files`."
    )
    shape: tuple[int, int, int] = field(
        default=(8, 8, 1), help="Height, width, channels that images are brought to."
    )
    max_bad_records: int = field(
        default=10, at_least=0, help="More of them end the run; ten are named."
    )
    cache: Literal["none", "memory"] = field(
        default="none", help="memory: images are read and decoded once, then kept."
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
        """Returns what stands beside each image."""

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
        from params.records import every_tenth

        own = str(self.files)
        if self.validation_files is None:
            return every_tenth(self.records("files", own), split)
        if split == "train":
            return self.records("files", own)
        return self.records("validation_files", self.validation_files)

    def open(self, split: Split) -> Examples:
        """Returns the images of a split, the first of them read.

        Raises:
            HyperparameterError: If there is none, or none that can be used.
        """
        from params.bad_records import BadRecords
        from params.inputs import Examples

        examples = Examples(
            self.source(split),
            shape=self.shape,
            target=self.target(),
            bad=BadRecords(self.max_bad_records),
            cache=self.cache == "memory",
        )
        examples.read(0)
        return examples
