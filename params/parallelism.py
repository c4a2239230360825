"""Experiments on how one small classifier is spread over devices.

The same network on the same images each time, so the results can be compared: they
differ by rounding alone. Times are of two cores that other programs ran on as well.
"""

from __future__ import annotations

from trainer.config import Optimizer, Pipelining, Saving, Training
from trainer.data.images import Augmentation
from trainer.tasks.image_classifier import Classifier


class Alone(Classifier):
    """On one device, to compare with.

    Command:   python -m trainer --params=parallelism.Alone --logdir=runs/alone
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      30 seconds.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    optimizer: Optimizer = Optimizer(learning_rate=2e-3)
    augmentation: Augmentation = Augmentation(shift=1)
    training: Training = Training(num_steps=400, batch_size=64, log_every=100)
    saving: Saving = Saving(checkpoint_steps=200)


class DataParallel(Alone):
    """Each of two devices has the whole network, and half of each batch.

    Command:   python -m trainer --params=parallelism.DataParallel --logdir=runs/data
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      1 minute.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    pipelining: Pipelining = Pipelining(num_replicas=2)


class Pipelined(Alone):
    """Each of two devices has half of the layers.

    Command:   python -m trainer --params=parallelism.Pipelined --logdir=runs/pipelined
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      40 seconds.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    pipelining: Pipelining = Pipelining(num_stages=2, num_microbatches=4, remat="none")


class PipelinedDataParallel(Alone):
    """Two pipelines of two stages, each of which has half of each batch.

    Command:   python -m trainer --params=parallelism.PipelinedDataParallel
               --logdir=runs/both
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      1.5 minutes, half of it tracing.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    pipelining: Pipelining = Pipelined.pipelining.replace(num_replicas=2)


class TensorParallel(Alone):
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

    pipelining: Pipelining = TensorParallel.pipelining.replace(sharding="ring")


class AllThree(Alone):
    """Two replicas of two stages of two shards: eight devices.

    Command:   python -m trainer --params=parallelism.AllThree --logdir=runs/all
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      1 to 1.5 minutes, most of it tracing.
    Result:    0.133 nats an image, 96.7% right; guessing has 2.303.
    """

    pipelining: Pipelining = PipelinedDataParallel.pipelining.replace(num_shards=2)
