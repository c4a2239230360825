"""Experiments on images: small networks that end up in 8-bit integers."""

from __future__ import annotations

from params.experiment import Adam, Pipelining, Training
from params.image_model import ImageModel
from params.precision import Precision


class DigitsQat(ImageModel):
    """A convolutional network trained for int8, exported, measured.

    Command:   python -m trainer --params=image.DigitsQat --logdir=runs/digits
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      2 minutes, a part of it for the same network without quantization.
    Result:    99.4% of the test images right in int8 as with floats, in 0.28 of the
               bytes. Over three seeds 98.8% to 99.4%, floats 99.0% to 99.4%.
    """

    pipelining: Pipelining = Pipelining(
        num_stages=2, num_microbatches=4, remat="none", batch_norm="deferred"
    )
    optimizer: Adam = Adam(learning_rate=3e-3)
    training: Training = Training(
        num_steps=400, batch_size=64, log_every=100, save_every=200, export=True
    )
    precision: Precision = Precision(quantize="8bit", quantize_start_step=100)
