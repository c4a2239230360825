"""Networks that tell images apart, on scikit-learn's digits or a user's own images."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from params import digits
from params.augmentation import Augmentation
from params.experiment import Experiment, Split
from params.image_data import Images
from params.share import WHOLE, Share
from trainer.hyperparams import field, override

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class ImageClassifier(Experiment):
    """Some network from pixels to logits of classes."""

    unit: ClassVar[str] = "image"

    data: Images = field(default=Images(), help="The images.")
    augmentation: Augmentation = field(
        default=Augmentation(), help="How images are changed in training."
    )

    @property
    def tokens_per_step(self) -> int:
        """How many images a step trains on."""
        return self.training.batch_size

    def metrics(self) -> list[keras.metrics.Metric]:
        """Returns the share of images that are right."""
        import keras

        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]

    def build_dataset(
        self, split: Split, *, first_step: int = 0, share: Share = WHOLE
    ) -> tf.data.Dataset:
        """Returns batches: each image once an epoch to train; in order to validate."""
        from params import inputs

        examples, training = self.data.open(split), self.training
        if split == "validation":
            return inputs.validation_batches(
                examples,
                batch_size=training.batch_size,
                num_batches=self.evaluation.num_batches,
            )
        return inputs.training_batches(
            examples,
            batch_size=training.batch_size,
            steps=range(first_step, training.num_steps),
            seed=self.seed,
            share=share,
            augmentation=self.augmentation,
        )

    def baselines(self) -> dict[str, float]:
        """Returns the loss of guessing, all classes being equally likely."""
        return {"guessing": math.log(self.data.num_classes)}

    def decode(self, model: keras.Model, folder: Path) -> str:
        """Writes what the model takes each validation image for, and returns how many.

        `predictions.csv` has a line for each: its number, its file, its label, the
        label that the model finds most likely, and how likely that is. Labels are the
        names of folders, or numbers as the files have them.
        """
        from params import inputs

        examples = self.data.open("validation")
        numbers = inputs.validation_numbers(
            len(examples),
            batch_size=self.training.batch_size,
            num_batches=self.evaluation.num_batches,
        )
        names = self.data.labels()
        number = right = 0
        path = folder / "predictions.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(["number", "file", "label", "predicted", "probability"])
            for chosen in numbers:
                pixels, labels = examples.stack(chosen)
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

    def representative(self) -> np.ndarray:
        """Returns images of the training split to find ranges with."""
        examples = self.data.open("train")
        return np.stack([examples.read(i)[0] for i in range(min(256, len(examples)))])

    def test_data(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the digits of the test split, None where images are a user's own."""
        if self.data.files is not None or self.data.shape != digits.SHAPE:
            return None
        images = digits.read("test")
        return images.pixels, images.labels

    def float_twin(self) -> Self | None:
        """Returns the same experiment without quantization, if it has any."""
        if not self.precision.quantizes:
            return None
        return override(self, ["precision.quantize=none", "training.export=false"])
