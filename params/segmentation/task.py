"""A network that tells the class of every pixel, as an experiment."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tfgpipe_params.segmentation import shapes
from tfgpipe_params.segmentation.scenes import SegmentationData
from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.experiment import Experiment, Split
from tfgpipe_trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfgpipe_params.image.image_examples import ImageExamples


_NUM_DRAWN = 16  # Images that `decode` draws.
_NUM_MADE = 256  # Images of validation that are made, unless others are asked for.


class Network(Hyperparams):
    """A U-Net."""

    depth: int = field(
        default=3, at_least=1, help="Number of times height and width are halved."
    )
    num_filters: int = field(
        default=8, at_least=1, help="Filters at full size, doubled at each smaller one."
    )


class Segmenter(Experiment):
    """A U-Net that tells discs, rectangles, triangles and background apart."""

    unit: ClassVar[str] = "pixel"

    data: SegmentationData = field(default=SegmentationData(), help="Images.")
    model: Network = field(default=Network(), help="Network.")

    @property
    def units_per_step(self) -> int:
        """Number of pixels in a batch."""
        height, width, _ = self.data.shape
        return self.training.batch_size * height * width

    def network(self) -> keras.Model:
        """Returns the network, from pixels to logits of each."""
        from tfgpipe_params.segmentation.unet import unet

        try:
            return unet(
                depth=self.model.depth,
                num_filters=self.model.num_filters,
                classes=self.data.classes,
                input_shape=self.data.shape,
            )
        except ValueError as error:
            raise HyperparameterError(f"data.shape: {error}") from None

    def loss(self) -> keras.losses.Loss:
        """Returns the loss of logits, in nats per pixel that is not ignored."""
        import keras

        return keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=self.data.ignore_class
        )

    def metrics(self) -> list[keras.metrics.Metric]:
        """Returns the intersection over union, its mean over classes."""
        import keras

        return [
            keras.metrics.MeanIoU(
                self.data.classes,
                ignore_class=self.data.ignore_class,
                sparse_y_pred=False,
                name="iou",
            )
        ]

    def batches(
        self, split: Split, *, first_step: int = 0, shard: HostShard | None = None
    ) -> tf.data.Dataset:
        """Returns batches of a user's own images, or made as they are asked for."""
        if self.data.files is not None:
            return super().batches(split, first_step=first_step, shard=shard)
        from tfgpipe_trainer.batches import from_function

        trains = split == "train"
        shard = shard if trains and shard is not None else HostShard()
        make = functools.partial(
            shapes.draw_shapes,
            rows=shard.rows(self.training.batch_size),
            size=self.data.shape[0],
            num_shapes=self.data.num_shapes,
            # Seeds are of training; all are to be compared on the same images.
            seed=self.seed if trains else 0,
            stream=split,
        )
        steps = range(first_step, self.training.num_steps)
        if not trains:
            steps = range(self.evaluation.max_batches or self._num_made_batches)
        return from_function(make, steps, num_workers=self.training.num_workers)

    def examples(self, split: Split) -> ImageExamples:
        """Returns the user's images of a split."""
        return self.data.open(split)

    @property
    def _num_made_batches(self) -> int:
        return math.ceil(_NUM_MADE / self.training.batch_size)

    def num_validation_examples(self) -> int:
        """Returns the number of validation images."""
        if self.data.files is None:
            return self._num_made_batches * self.training.batch_size
        return len(self.data.open("validation"))

    def baselines(self) -> dict[str, float]:
        """Returns the loss of guessing, all classes being equally likely."""
        return {"guessing": math.log(self.data.classes)}

    def decode(self, model: keras.Model, folder: Path) -> str:
        """Draws images with their classes, and returns the IoU of each class.

        `masks.png` has an image a row: the image, the classes it was made of, the
        classes that the model finds.
        """
        import tensorflow as tf

        num_classes = self.data.classes
        counts = np.zeros((num_classes, num_classes), np.int64)  # [wanted, received]
        rows: list[np.ndarray] = []
        for pixels, wanted in self.batches("validation").as_numpy_iterator():
            found = np.asarray(model.predict(pixels, verbose=0)).argmax(axis=-1)
            counted = wanted != self.data.ignore_class
            np.add.at(counts, (wanted[counted], found[counted]), 1)
            grey = pixels.mean(axis=-1)
            for image, *masks in zip(grey, wanted, found, strict=True):
                if len(rows) < _NUM_DRAWN:
                    shades = [mask / (num_classes - 1) for mask in masks]
                    rows.append(np.concatenate([image, *shades], axis=1))
        drawing = (np.concatenate(rows).clip(0, 1) * 255).astype(np.uint8)[..., None]
        path = folder / "masks.png"
        path.write_bytes(tf.io.encode_png(drawing).numpy())
        overlap = np.diag(counts)
        union = counts.sum(axis=0) + counts.sum(axis=1) - overlap
        # A class that is nowhere has none, and is left out of the mean, as in Keras.
        there = union > 0
        iou = overlap[there] / union[there]
        shown = [f"{each:.3f}" for each in iou]
        named = dict.fromkeys(self.data.names, "none")
        named |= zip(np.array(self.data.names)[there].tolist(), shown, strict=True)
        return (
            f"IoU {iou.mean():.3f}: "
            + ", ".join(f"{name} {each}" for name, each in named.items())
            + f". Image, wanted, received: {path}"
        )
