"""Experiments on images: scikit-learn's digits, or your own.

All take your own images:

    --set='data.files=PICTURES/*/*.jpg'                       PICTURES/LABEL/NAME.jpg
    --set=data.files=ARRAYS.npz                               x and y in a file
    --set='data.files=RECORDS/train-*' --set=data.classes=5   TFRecord files
    --set=data.files=mnist#train --set=data.format=tfds --set=data.classes=10

The last needs TensorFlow Datasets. Labels of records count from `data.first_label`, 0
by default. Every tenth is for validation, unless `data.validation_files` names others.
Times are of two cores that other programs ran on as well.
"""

from __future__ import annotations

from tfgpipe_params.image.classifiers import (
    AmoebaNet,
    AmoebaNetClassifier,
    ConvNetClassifier,
    ResNetClassifier,
)
from tfgpipe_params.image.digits import DigitImages
from tfgpipe_params.image.images import Augmentation
from tfgpipe_trainer.config import Optimizer, Pipelining, Precision, Saving, Training


class Digits(ConvNetClassifier):
    """A convolutional network on scikit-learn's digits.

    Command:   python -m trainer --params=image.Digits --logdir=runs/digits
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      20 seconds.
    Result:    98.3% of the validation images right; 0.051 nats an image, guessing has
               2.303.
    """

    pipelining: Pipelining = Pipelining(
        num_stages=2, num_microbatches=4, remat="none", batch_norm="deferred"
    )
    optimizer: Optimizer = Optimizer(learning_rate=3e-3)
    augmentation: Augmentation = Augmentation(shift=1)
    training: Training = Training(num_steps=300, batch_size=64, log_every=100)
    checkpoint: Saving = Saving(every_steps=100)


class AmoebaNetDSmall(AmoebaNetClassifier):
    """AmoebaNet-D (3, 16), 0.1 million weights, on scikit-learn's digits.

    Command:   python -m trainer --params=image.AmoebaNetDSmall --logdir=runs/amoebanet
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      2.5 minutes of computing, half of it tracing; about 5 on cores that other
               programs had as well.
    Result:    94.6% of the validation images right; 0.194 nats an image, guessing has
               2.303.
    """

    pipelining: Pipelining = Digits.pipelining.replace(num_microbatches=2)
    optimizer: Optimizer = Optimizer(learning_rate=5e-3)
    data: DigitImages = DigitImages(shape=(32, 32, 1))
    augmentation: Augmentation = Augmentation(shift=3)
    model: AmoebaNet = AmoebaNet(num_layers=3, num_filters=16)
    training: Training = Digits.training.replace(num_steps=200, log_every=50)
    checkpoint: Saving = Saving(every_steps=50)


class AmoebaNetD(AmoebaNetClassifier):
    """AmoebaNet-D (18, 208), 82 million weights, the first in GPipe's Table 1.

    Command:   python -m trainer --params=image.AmoebaNetD --logdir=runs/amoebanet-d
               --set='data.files=IMAGENET/train-*'
               --set='data.validation_files=IMAGENET/validation-*'
    Hardware:  4 accelerators.
    Memory:    1.3 GB each, as --mode=inspect plans it; stages of even FLOPs within 2%.
    Time:      not measured.
    Result:    not measured. GPipe's AmoebaNet-B (18, 512), of 557 million weights, has
               84.4% of ImageNet's validation images right.
    Data:      ImageNet as TFRecord files, labels 1 to 1000; 80,000 steps of 128 are 8
               epochs.
    """

    num_accelerators = 4
    pipelining: Pipelining = Pipelining(
        num_stages=4, num_microbatches=32, balance="flops", batch_norm="deferred"
    )
    optimizer: Optimizer = Optimizer(learning_rate=1e-3, warmup=0.02, weight_decay=0.05)
    data: DigitImages = DigitImages(shape=(224, 224, 3), classes=1000, first_label=1)
    augmentation: Augmentation = Augmentation(shift=16, flip="horizontal")
    training: Training = Training(num_steps=80_000, batch_size=128)
    checkpoint: Saving = Saving(every_steps=500, every_minutes=30, keep_hours=12)


class ResNet50(ResNetClassifier):
    """ResNet-50, 23.6 million weights for 10 classes, on images of your own.

    Command:   python -m trainer --params=image.ResNet50 --logdir=runs/resnet50
               --set='data.files=PICTURES/*/*.jpg'
    Hardware:  2 accelerators.
    Memory:    1.7 GB each for 128 images of 224 x 224, as --mode=inspect plans it.
    Time:      not measured.
    """

    num_accelerators = 2
    pipelining: Pipelining = AmoebaNetD.pipelining.replace(
        num_stages=2, num_microbatches=8
    )
    data: DigitImages = DigitImages(shape=(224, 224, 3))
    augmentation: Augmentation = AmoebaNetD.augmentation
    training: Training = AmoebaNetD.training.replace(num_steps=10_000)
    checkpoint: Saving = AmoebaNetD.checkpoint


class DigitsQat(Digits):
    """A convolutional network trained for int8, exported, measured.

    Command:   python -m trainer --params=image.DigitsQat --logdir=runs/digits
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      40 seconds.
    Result:    99.2% of the test images right in int8 as with floats, in 0.28 of the
               bytes (`python -m benchmarks.studies.int8`).
    """

    training: Training = Digits.training.replace(num_steps=400, export=True)
    checkpoint: Saving = Saving(every_steps=200)
    precision: Precision = Precision(quantize="8bit", quantize_start_step=100)
