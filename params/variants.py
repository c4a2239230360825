"""Variants of the template: other data, a model class, a network on images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfgpipe_params import image, template
from tfgpipe_trainer.experiment import Split

if TYPE_CHECKING:
    import keras


class FromDataset(template.Mine):
    """The same from a `tf.data.Dataset` of single examples.

    Time:      20 seconds.
    """

    def examples(self, split: Split) -> Any:
        """Returns a dataset; a seed makes a run that was stopped go on exactly."""
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices(super().examples(split))
        return dataset.shuffle(1000, seed=self.seed) if split == "train" else dataset


class FromItems(template.Mine):
    """The same from what has `len(items)` and `items[i]`, such as a list.

    With `training.num_workers` processes that read ahead.

    Time:      20 seconds.
    """

    def examples(self, split: Split) -> Any:
        """Returns a sequence of examples."""
        return list(zip(*super().examples(split), strict=True))


class SubclassedModel(template.Mine):
    """The same with a model class, whose `call` consists of layers and `keras.ops`.

    Time:      20 seconds.
    """

    def network(self) -> keras.Model:
        """Returns the network of the class as a Functional model."""
        import keras

        class Residual(keras.Model):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.first = keras.layers.Dense(width)
                self.hidden = keras.layers.Dense(width, activation="gelu")
                self.last = keras.layers.Dense(8)

            def call(self, x: Any) -> Any:
                x = self.first(x)
                return self.last(x + self.hidden(x))

        inputs = keras.Input([3])
        return keras.Model(inputs, Residual(self.width).call(inputs))


class CustomImageModel(image.Digits):
    """A network of your own on images, those of scikit-learn or your own.

    Command:   python -m trainer --params=variants.CustomImageModel --logdir=runs/images
               --set='data.files=PICTURES/*/*.png' --set=data.shape=32,32,3
    Time:      20 seconds.
    """

    def network(self) -> keras.Model:
        """Returns the network, from pixels between 0 and 1 to logits."""
        from keras import Input, Sequential, layers

        return Sequential(
            [
                Input(self.data.shape),
                layers.Conv2D(16, 3, padding="same", activation="relu"),
                layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(self.data.num_classes),
            ]
        )
