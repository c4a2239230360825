"""Experiments on how one small classifier is spread over devices.

The same network on the same images each time, so the results can be compared: they
differ by rounding alone. Times are of two cores that other programs ran on as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfgpipe_params.image.classifiers import DigitClassifier
from tfgpipe_params.image.images import Augmentation
from tfgpipe_trainer.config import Optimizer, Pipelining, Saving, Training
from tfgpipe_trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras


class _Perceptrons(Hyperparams):
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


class _Classifier(DigitClassifier):
    """A perceptron that tells images apart."""

    model: _Perceptrons = field(default=_Perceptrons(), help="Network.")

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
            if pipelining.tp_collective == "sequence":
                raise HyperparameterError(
                    'pipelining.tp_collective: expected "gather" or "ring", as '
                    'images are no sequences; received "sequence".'
                )
            try:
                block = tfgpipe.layers.TPMLP(
                    hyper.hidden,
                    units=hyper.width,
                    collective=pipelining.tp_collective,
                    num_shards=pipelining.num_shards,
                )
            except ValueError as error:
                raise HyperparameterError(f"model: {error}") from None
            return [block]
        return [
            keras.layers.Dense(hyper.hidden, activation="gelu"),
            keras.layers.Dense(hyper.width),
        ]


class SingleDevice(_Classifier):
    """On one device, to compare with.

    Command:   python -m trainer --params=parallelism.SingleDevice --logdir=runs/alone
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      30 seconds.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    optimizer: Optimizer = Optimizer(learning_rate=2e-3)
    augmentation: Augmentation = Augmentation(shift=1)
    training: Training = Training(num_steps=400, batch_size=64, log_every=100)
    checkpoint: Saving = Saving(every_steps=200)


class DataParallel(SingleDevice):
    """Each of two devices has the whole network, and half of each batch.

    Command:   python -m trainer --params=parallelism.DataParallel --logdir=runs/data
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      1 minute.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    pipelining: Pipelining = Pipelining(num_replicas=2)


class Pipelined(SingleDevice):
    """Each of two devices has half of the layers.

    Command:   python -m trainer --params=parallelism.Pipelined --logdir=runs/pipelined
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      40 seconds.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    pipelining: Pipelining = Pipelining(num_stages=2, num_microbatches=4, remat="none")


class PipelinedDataParallel(SingleDevice):
    """Two pipelines of two stages, each of which has half of each batch.

    Command:   python -m trainer --params=parallelism.PipelinedDataParallel
               --logdir=runs/both
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      1.5 minutes, half of it tracing.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    pipelining: Pipelining = Pipelined.pipelining.replace(num_replicas=2)


class TensorParallel(SingleDevice):
    """Each of two devices has half of the units of each hidden layer.

    Command:   python -m trainer --params=parallelism.TensorParallel --logdir=runs/tp
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      40 seconds.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    pipelining: Pipelining = Pipelining(num_shards=2)


class TensorParallelRing(TensorParallel):
    """The same, parts of a product moving on while parts are multiplied.

    Command:   python -m trainer --params=parallelism.TensorParallelRing
               --logdir=runs/ring
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      45 seconds.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    pipelining: Pipelining = TensorParallel.pipelining.replace(tp_collective="ring")


class DataPipelineTensor(SingleDevice):
    """Two replicas of two stages of two shards: eight devices.

    Command:   python -m trainer --params=parallelism.DataPipelineTensor
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      1 to 1.5 minutes, most of it tracing.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    pipelining: Pipelining = PipelinedDataParallel.pipelining.replace(num_shards=2)
