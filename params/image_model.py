"""A convolutional network that tells images apart, as an experiment."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Self

from params import digits
from params.experiment import Experiment, Split
from tfgpipe.hyperparams import Hyperparams, field, override

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

    import tfgpipe


class ConvNet(Hyperparams):
    """Convolutions, each with batch normalization and ReLU, then two dense layers."""

    channels: tuple[int, ...] = field(
        default=(32, 64, 64), help="Channels of each convolution."
    )
    strides: tuple[int, ...] = field(
        default=(1, 2, 2), help="Pixels from one window to the next, of each."
    )
    width: int = field(default=128, at_least=1, help="Width of the dense layer.")


class ImageModel(Experiment):
    """A network that tells handwritten digits apart."""

    unit: ClassVar[str] = "image"

    model: ConvNet = field(default=ConvNet(), help="The network.")
    shift: int = field(
        default=1, at_least=0, help="Most pixels that images are moved in training."
    )

    @property
    def tokens_per_step(self) -> int:
        """How many images a step trains on."""
        return self.training.batch_size

    def build_model(self) -> tfgpipe.PipelinedModel:
        """Returns the compiled model, from pixels to logits."""
        import keras

        layers = keras.layers
        with self.precision.scope():
            stack = [keras.Input(digits.SHAPE)]
            for channels, strides in zip(
                self.model.channels, self.model.strides, strict=True
            ):
                stack += [
                    layers.Conv2D(
                        channels, 3, strides=strides, padding="same", use_bias=False
                    ),
                    layers.BatchNormalization(momentum=0.9),
                    layers.ReLU(),
                ]
            stack += [
                layers.Flatten(),
                layers.Dense(self.model.width, activation="relu"),
                layers.Dense(digits.NUM_CLASSES),
            ]
            plain = self.precision.apply(keras.Sequential(stack))
            model = self.pipelining.build(plain)
            model.compile(
                optimizer=self.optimizer.build(self.training.num_steps),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        return model

    def build_dataset(self, split: Split, *, first_step: int = 0) -> tf.data.Dataset:
        """Returns batches: random ones, moved a little, to train; all to validate."""
        import tensorflow as tf

        images = digits.read(split)
        size = self.training.batch_size
        if split == "validation":
            return tf.data.Dataset.from_tensor_slices(
                (images.pixels, images.labels)
            ).batch(size)
        pixels, labels = tf.constant(images.pixels), tf.constant(images.labels)
        shift = self.shift
        margin = tf.pad(pixels, [[0, 0], [shift, shift], [shift, shift], [0, 0]])
        height, width, _ = digits.SHAPE

        def draw(step: tf.Tensor, which: int, shape: list[int], end: int) -> tf.Tensor:
            seed = tf.stack([tf.constant(self.seed, tf.int64), 3 * step + which])
            return tf.random.stateless_uniform(
                shape, seed=seed, maxval=end, dtype=tf.int64, alg="philox"
            )

        def batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            chosen = draw(step, 0, [size], len(images.labels))
            down = draw(step, 1, [size, 1], 2 * shift + 1) + tf.range(
                height, dtype=tf.int64
            )
            right = draw(step, 2, [size, 1], 2 * shift + 1) + tf.range(
                width, dtype=tf.int64
            )
            moved = tf.gather(tf.gather(margin, chosen), down, batch_dims=1)
            moved = tf.gather(moved, right, axis=2, batch_dims=1)
            return moved, tf.gather(labels, chosen)

        steps = tf.data.Dataset.range(first_step, self.training.num_steps)
        return steps.map(batch).prefetch(2)

    def baselines(self) -> dict[str, float]:
        """Returns the loss of guessing, all digits being equally likely."""
        return {"guessing": math.log(digits.NUM_CLASSES)}

    def representative(self) -> np.ndarray:
        """Returns images of the training split to find ranges with."""
        return digits.read("train").pixels[:256]

    def test_data(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the images and labels of the test split."""
        images = digits.read("test")
        return images.pixels, images.labels

    def float_twin(self) -> Self | None:
        """Returns the same experiment without quantization, if it has any."""
        if not self.precision.quantizes:
            return None
        return override(self, ["precision.quantize=none", "training.export=false"])
