"""Classifying images: the task, and the networks that experiments choose from."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from trainer.data.batches import validation_indices
from trainer.data.images import Augmentation, Images
from trainer.experiment import Experiment, Split
from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras

    from trainer.data.image_examples import ImageExamples


class ImageClassifier(Experiment):
    """Some network from pixels to logits of classes."""

    unit: ClassVar[str] = "image"

    data: Images = field(default=Images(), help="Images.")
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
            num_batches=self.evaluation.num_batches,
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


class ConvNet(Hyperparams):
    """Convolutions, each with batch normalization and ReLU, then two dense layers."""

    channels: tuple[int, ...] = field(
        default=(32, 64, 64), help="Channels of each convolution."
    )
    strides: tuple[int, ...] = field(
        default=(1, 2, 2), help="Stride of each convolution."
    )
    width: int = field(default=128, at_least=1, help="Width of the dense layer.")

    def validate(self) -> None:
        """Checks that there is a stride for each convolution."""
        for name, numbers in (("channels", self.channels), ("strides", self.strides)):
            if len(numbers) != len(self.channels) or min(numbers, default=1) < 1:
                raise HyperparameterError(
                    f"{name}: expected {len(self.channels)} numbers of at least 1, one "
                    f"for each convolution; received {numbers}."
                )

    def build(self, shape: tuple[int, ...], classes: int) -> keras.Model:
        """Returns the network, from pixels to logits.

        Args:
            shape: Height, width, channels of an image.
            classes: Number of classes.
        """
        import keras

        layers = keras.layers
        stack = [keras.Input(shape)]
        for channels, strides in zip(self.channels, self.strides, strict=True):
            stack += [
                layers.Conv2D(
                    channels, 3, strides=strides, padding="same", use_bias=False
                ),
                layers.BatchNormalization(momentum=0.9),
                layers.ReLU(),
            ]
        stack += [
            layers.Flatten(),
            layers.Dense(self.width, activation="relu"),
            layers.Dense(classes),
        ]
        return keras.Sequential(stack)


class ConvNetClassifier(ImageClassifier):
    """A plain convolutional network."""

    model: ConvNet = field(default=ConvNet(), help="Network.")

    def network(self) -> keras.Model:
        """Returns the network, from pixels to logits."""
        return self.model.build(self.data.shape, self.data.num_classes)


class AmoebaNet(Hyperparams):
    """The size of an AmoebaNet-D, as GPipe gives it."""

    num_layers: int = field(
        default=18, at_least=3, help="Number of normal cells, L; a multiple of 3."
    )
    num_filters: int = field(
        default=208, at_least=16, help="Filters of the first cell, D; a multiple of 16."
    )


class AmoebaNetClassifier(ImageClassifier):
    """AmoebaNet-D, the network that GPipe was measured with."""

    model: AmoebaNet = field(default=AmoebaNet(), help="Network.")

    def network(self) -> keras.Model:
        """Returns the network, from pixels to logits."""
        from trainer.models.amoebanet import amoebanet_d

        try:
            return amoebanet_d(
                num_layers=self.model.num_layers,
                num_filters=self.model.num_filters,
                classes=self.data.num_classes,
                input_shape=self.data.shape,
            )
        except ValueError as error:
            raise HyperparameterError(f"model: {error}") from None


class ResNetClassifier(ImageClassifier):
    """ResNet-50 as Keras has it, from random weights."""

    def network(self) -> keras.Model:
        """Returns the network, from pixels to logits."""
        import keras

        height, width, _ = self.data.shape
        if min(height, width) < 32:
            raise HyperparameterError(
                "data.shape: expected a height and a width of at least 32, which "
                f"ResNet-50 takes; received {self.data.shape}."
            )
        return keras.applications.ResNet50(
            weights=None,
            input_shape=self.data.shape,
            classes=self.data.num_classes,
            classifier_activation=None,
        )


class Mlp(Hyperparams):
    """Perceptrons of two layers, one after another, between a dense layer at each end.

    Shards are of the hidden layers: each device has a part of every one.
    """

    num_blocks: int = field(
        default=4, at_least=1, help="Number of residual blocks of two layers."
    )
    width: int = field(default=128, at_least=1, help="Width of the residual stream.")
    hidden: int = field(default=512, at_least=1, help="Hidden width of each block.")
    dropout: float = field(
        default=0.0,
        at_least=0,
        less_than=1,
        help="Dropout rate after each block.",
    )


class Classifier(ImageClassifier):
    """A perceptron that tells images apart."""

    model: Mlp = field(default=Mlp(), help="Network.")

    def network(self) -> keras.Model:
        """Returns the network, from pixels to logits."""
        import keras

        layers = keras.layers
        stack = [
            keras.Input(self.data.shape),
            layers.Flatten(),
            layers.Dense(self.model.width, activation="gelu"),
        ]
        for _ in range(self.model.num_blocks):
            stack += [layers.LayerNormalization(), *self._block()]
            if self.model.dropout:
                stack.append(layers.Dropout(self.model.dropout))
        return keras.Sequential([*stack, layers.Dense(self.data.num_classes)])

    def _block(self) -> list[Any]:
        """Returns the layers of a perceptron: one in shards, or two that are whole."""
        import keras

        import tfgpipe

        hyper, pipelining = self.model, self.pipelining
        if pipelining.num_shards > 1:
            if pipelining.sharding == "sequence":
                raise HyperparameterError(
                    'pipelining.sharding: expected "sync" or "ring", as images are no '
                    'sequences; received "sequence".'
                )
            try:
                block = tfgpipe.layers.TPMLP(
                    hyper.hidden,
                    units=hyper.width,
                    collective="ring" if pipelining.sharding == "ring" else "gather",
                    num_shards=pipelining.num_shards,
                )
            except ValueError as error:
                raise HyperparameterError(f"model: {error}") from None
            return [block]
        return [
            keras.layers.Dense(hyper.hidden, activation="gelu"),
            keras.layers.Dense(hyper.width),
        ]
