"""Classifying images: the task, and the networks that experiments choose from."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tfgpipe_params.image.images import Augmentation, ClassificationData
from tfgpipe_trainer.batches import validation_indices
from tfgpipe_trainer.experiment import Experiment, Split
from tfgpipe_trainer.hyperparams import field

if TYPE_CHECKING:
    import keras

    from tfgpipe_params.image.image_examples import ImageExamples


class ImageClassifier(Experiment):
    """Some network from pixels to logits of classes."""

    unit: ClassVar[str] = "image"

    data: ClassificationData = field(default=ClassificationData(), help="Images.")
    augmentation: Augmentation = field(
        default=Augmentation(), help="Augmentation of training images."
    )

    def metrics(self) -> list[keras.metrics.Metric]:
        """Returns the share of images that are right."""
        import keras

        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]

    def examples(self, split: Split) -> ImageExamples:
        """Returns the images of a split, and says how many of the user's it has."""
        examples = self.data.open(split)
        if self.data.files is not None:
            print(
                f"{split}: {len(examples):,} images of {self.data.num_classes} "
                f"classes, resized to data.shape={self.data.shape}.",
                flush=True,
            )
        return examples

    def num_validation_examples(self) -> int:
        """Returns the number of validation images."""
        return len(self.data.open("validation"))

    def transform(
        self, batch: tuple[np.ndarray, np.ndarray], step: int, rows: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns a training batch with its images changed."""
        pixels, labels = batch
        # Drawn for the whole batch: a row does not depend on who reads it.
        pixels = self.augmentation.apply(
            pixels,
            rows=rows,
            batch_size=self.training.batch_size,
            seed=self.seed,
            step=step,
        )
        return pixels, labels

    def baselines(self) -> dict[str, float]:
        """Returns the loss of guessing, all classes being equally likely."""
        return {"guessing": math.log(self.data.num_classes)}

    def decode(self, model: keras.Model, folder: Path) -> str:
        """Writes what the model takes each validation image for, and returns how many.

        `predictions.csv` has a line for each: its number, its file, its label, the
        label that the model finds most likely, and how likely that is. Labels are the
        names of folders, or numbers as the files have them.
        """
        examples = self.data.open("validation")
        numbers = validation_indices(
            len(examples),
            batch_size=self.training.batch_size,
            num_batches=self.evaluation.max_batches,
        )
        names = self.data.labels()
        number = right = 0
        path = folder / "predictions.csv"
        with path.open(
            "w",
            encoding="utf-8",
            errors="backslashreplace",  # Names of files are any bytes.
            newline="",
        ) as file:
            table = csv.writer(file)
            table.writerow(["number", "file", "label", "predicted", "probability"])
            for chosen in numbers:
                pixels, labels = examples.take(chosen)
                logits = np.float64(model.predict(pixels, verbose=0))
                odds = np.exp(logits - logits.max(axis=1, keepdims=True))
                shares = odds / odds.sum(axis=1, keepdims=True)
                found = shares.argmax(axis=1)
                right += int((found == labels).sum())
                for row, example in enumerate(chosen.tolist()):
                    place = examples.name(example)
                    label, predicted = names[labels[row]], names[found[row]]
                    share = f"{shares[row].max():.4f}"
                    table.writerow([number, place, label, predicted, share])
                    number += 1
        return f"accuracy {right / number:.1%} of {number} validation images: {path}"
