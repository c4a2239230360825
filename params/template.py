"""Your own experiment: copy this file, change it, train it.

    cp params/template.py params/mine.py
    python -m trainer --params=mine.Mine --logdir=runs/mine

The file may be wherever Python can import it, `--params=my_package.my_file.Mine`; in
another folder with `PYTHONPATH=CHECKOUT`. All that `--mode=describe --params=mine.Mine`
prints can be set in the class, or by `--set=training.num_steps=500`. Keras is imported
in the methods, so that `python -m trainer` lists experiments at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from params import image
from trainer.config import Evaluation, Pipelining, Training
from trainer.experiment import Experiment, Split
from trainer.hyperparams import field

if TYPE_CHECKING:
    import keras


class Mine(Experiment):
    """A perceptron that learns which corner of a cube is nearest, in two stages.

    Command:   python -m trainer --params=template.Mine --logdir=runs/mine
    Hardware:  2 CPU cores, no accelerator.
    Time:      20 seconds.
    Result:    98% of the validation examples right.
    """

    width: int = field(default=64, at_least=1, help="Units of a hidden layer.")
    pipelining = Pipelining(num_stages=2, num_microbatches=4)
    training = Training(num_steps=500, batch_size=64, log_every=25)
    evaluation = Evaluation(steps=100, num_batches=8)

    def network(self) -> keras.Model:
        """Returns a Sequential or Functional model, from inputs to logits."""
        from keras import Input, Sequential, layers

        hidden = [layers.Dense(self.width, activation="gelu") for _ in range(3)]
        return Sequential([Input([3]), *hidden, layers.Dense(8)])

    def examples(self, split: Split) -> Any:
        """Returns arrays: inputs and targets, a row for each example."""
        random = np.random.default_rng(["train", "validation"].index(split))
        points = random.uniform(-1, 1, [10_000, 3])
        return points, (points > 0) @ [1, 2, 4]

    # By default the loss is the cross-entropy of logits, and nothing else is measured.
    def metrics(self) -> list[keras.metrics.Metric]:
        """Returns what is measured beside the loss."""
        import keras

        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


class FromDataset(Mine):
    """The same from a `tf.data.Dataset` of single examples.

    Time:      20 seconds.
    """

    def examples(self, split: Split) -> Any:
        """Returns a dataset; a seed makes a run that was stopped go on exactly."""
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices(super().examples(split))
        return dataset.shuffle(1000, seed=self.seed) if split == "train" else dataset


class FromItems(Mine):
    """The same from what has `len(items)` and `items[i]`, such as a list.

    With `training.num_workers` processes that read ahead.

    Time:      20 seconds.
    """

    def examples(self, split: Split) -> Any:
        """Returns a sequence of examples."""
        return list(zip(*super().examples(split), strict=True))


class OwnClass(Mine):
    """The same with a model class, whose `call` consists of layers and `keras.ops`.

    Time:      20 seconds.
    """

    def network(self) -> keras.Model:
        """Returns what the class does as a Functional model."""
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


class OnImages(image.Digits):
    """A network of your own on images, those of scikit-learn or your own.

    Command:   python -m trainer --params=template.OnImages --logdir=runs/images
               --set='data.files=PICTURES/*/*.png' --set=data.shape=32,32,3
    Time:      20 seconds.
    """

    optimizer = image.Digits.optimizer.replace(learning_rate=1e-3)

    def network(self) -> keras.Model:
        """Returns the network, from pixels between 0 and 1 to logits."""
        from keras import Input, Sequential, layers

        return Sequential(
            [
                Input(self.data.shape),
                layers.Conv2D(16, 3, padding="same", activation="relu"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(64, activation="relu"),
                layers.Dense(self.data.num_classes),
            ]
        )
