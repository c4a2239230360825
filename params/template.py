"""Your own experiment: copy this file, change it, train it.

    tfgpipe-train --mode=template > mine.py
    tfgpipe-train --params=mine.Mine

The file may be wherever Python can import it, `--params=my_package.my_file.Mine`. In a
checkout `python -m trainer` is the same command, and `params/mine.py` a place. All that
`--mode=describe --params=mine.Mine` prints can be set in the class, or by
`--set=training.num_steps=500`. Keras is imported in the methods, so that experiments
are listed at once.

`params/variants.py` has the same with a `tf.data.Dataset`, a list of examples, a model
class, and a network on images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tfgpipe_trainer.config import Evaluation, Pipelining, Training
from tfgpipe_trainer.experiment import Experiment, Split
from tfgpipe_trainer.hyperparams import field

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
    evaluation = Evaluation(every_steps=100)

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
        """Returns the metrics beside the loss."""
        import keras

        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
