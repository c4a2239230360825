"""A U-Net in a training loop of your own, with a loss over the whole batch.

    python examples/unet.py [PICTURE]

It needs no GPU, takes 10 seconds, writes PICTURE (`unet.png`), and ends with:

    3 stages, 4 microbatches of 8 examples, remat=stage, partition as given
    stage  layers                                 parameters   FLOPs     memory   receives  share
    0      conv2d .. conv2d_transpose (6)              7,952  51.9 M  924.2 KiB        0 B  24.4%
    1      concatenate .. conv2d_transpose_1 (3)       5,144  84.3 M    1.7 MiB  256.0 KiB  39.6%
    2      concatenate_1 .. conv2d_5 (3)               1,169  76.5 M    2.8 MiB  512.0 KiB  36.0%
    imbalance 1.189, bubble 39.1%, 2.8 MiB on the fullest device
    the loss fell from above 0.5 to below 0.2 in 40 steps
"""

import sys

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import tfgpipe

tfgpipe.make_logical_cpus(3)
keras.utils.set_random_seed(0)


def convolve(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    """Returns the output of a 3 x 3 convolution."""
    return keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)


image = keras.Input((32, 32, 1))
top = convolve(image, 8)
middle = convolve(keras.layers.MaxPooling2D()(top), 16)
x = convolve(keras.layers.MaxPooling2D()(middle), 32)
for skip, filters in ((middle, 16), (top, 8)):
    x = keras.layers.Conv2DTranspose(filters, 2, strides=2)(x)
    x = convolve(keras.layers.Concatenate()([skip, x]), filters)
unet = keras.Model(image, keras.layers.Conv2D(1, 1, activation="sigmoid")(x))

# Skip connections go straight from the stage that computes to the stage that needs them.
layer = tfgpipe.PipelinedLayer(
    unet, num_stages=3, num_microbatches=4, balance="flops", name="unet"
)
print(layer.plan(batch_size=32))
optimizer = keras.optimizers.Adam(1e-2)
tfgpipe.place_optimizer(optimizer)  # Slots and updates where the weights are.


def dice(masks: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
    """Returns one minus the overlap over all pixels of the batch, from 0 to 1.

    It is no mean over examples, which a `PipelinedModel` would need. In a loop of
    your own the loss is outside of the pipeline, and may be any.
    """
    both = tf.reduce_sum(masks * predicted)
    return 1 - 2 * both / (tf.reduce_sum(masks) + tf.reduce_sum(predicted))


@tf.function
def train_step(images: tf.Tensor, masks: tf.Tensor) -> tf.Tensor:
    """Updates the weights, and returns the loss."""
    with tf.GradientTape() as tape:
        loss = dice(masks, layer(images, training=True))
    gradients = tape.gradient(loss, layer.trainable_variables)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
    return loss


random = np.random.default_rng(0)
centres = random.uniform(8, 24, (32, 2, 1, 1))
down, across = np.mgrid[:32, :32]
discs = np.hypot(down - centres[:, 0], across - centres[:, 1]) < 6
masks = discs[..., None].astype("float32")
images = masks + random.normal(0, 0.5, masks.shape).astype("float32")

losses = [float(train_step(images, masks)) for _ in range(40)]
assert losses[-1] < 0.2 < losses[0]
print(f"the loss fell from above 0.5 to below 0.2 in {len(losses)} steps")

_, axes = plt.subplots(1, 3, figsize=(6, 2.3))
shown = {"input": images, "mask": masks, "predicted": layer(images)}
for axis, (title, pixels) in zip(axes, shown.items(), strict=True):
    axis.imshow(pixels[0, ..., 0], cmap="gray")
    axis.set_title(title)
    axis.axis("off")
plt.savefig(sys.argv[1] if len(sys.argv) > 1 else "unet.png", dpi=80)
