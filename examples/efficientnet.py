"""EfficientNet on a folder of images, with the batch statistics of the mini-batch.

    python examples/efficientnet.py [FOLDER]

FOLDER has one folder of images for each class; without it some are drawn into `shapes/`.
It needs no GPU, takes 60 seconds, and ends with:

    2 stages, 4 microbatches of 4 examples, remat=stage, partition as given
    stage  layers                                        parameters  FLOPs    memory  receives  share
    0      rescaling .. block5b_expand_activation (134)     522,959  147 M  14.8 MiB       0 B  49.9%
    1      block5b_dwconv .. predictions (105)            3,529,174  148 M  55.7 MiB  49.0 KiB  50.1%
    imbalance 1.002, bubble 20.1%, 55.7 MiB on the fullest device
    stem_bn's moving mean has moved once, by the mean of the whole mini-batch
    trained on images of the classes disc square
"""

import sys
from pathlib import Path

import keras
import numpy as np

import tfgpipe

tfgpipe.make_logical_cpus(2)
keras.utils.set_random_seed(0)
SIZE = 32


def draw_shapes(folder: Path) -> None:
    """Writes 64 pictures of dark discs and squares."""
    random = np.random.default_rng(0)
    down, across = np.mgrid[:SIZE, :SIZE] - SIZE / 2
    shapes = {
        "disc": np.hypot(down, across),
        "square": np.maximum(abs(down), abs(across)),
    }
    for name, distance in shapes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(32):
            pixels = random.uniform(150, 255, (SIZE, SIZE, 3))
            pixels[distance < random.uniform(6, 14)] *= 0.4
            keras.utils.save_img(folder / name / f"{i}.png", pixels, scale=False)


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "shapes")
if not folder.exists():
    draw_shapes(folder)
images = keras.utils.image_dataset_from_directory(
    folder, image_size=(SIZE, SIZE), batch_size=16, seed=0
)

model = keras.applications.EfficientNetB0(
    weights=None, input_shape=(SIZE, SIZE, 3), classes=len(images.class_names)
)
# Each microbatch is normalized with its own statistics. "deferred" moves the moving
# averages once a step, by those of the mini-batch, as the model without a pipeline does.
pipelined = tfgpipe.pipeline(
    model, num_stages=2, num_microbatches=4, balance="flops", batch_norm="deferred"
)
pipelined.compile(
    keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
)
print(pipelined.plan(batch_size=16))

first = images.take(1).cache()  # One batch, the same each time.
batch, _ = next(iter(first))
normalization = model.get_layer("stem_bn")
stem = keras.Model(model.input, model.get_layer("stem_conv").output)
mean = np.mean(stem(batch), axis=(0, 1, 2))  # Of the mini-batch, for each channel.
pipelined.fit(first, verbose=0)
moved = (1 - normalization.momentum) * mean
np.testing.assert_allclose(
    normalization.moving_mean.numpy(), moved, rtol=1e-3, atol=1e-5
)
print("stem_bn's moving mean has moved once, by the mean of the whole mini-batch")

losses = pipelined.fit(images, epochs=2, verbose=0).history["loss"]
assert np.isfinite(losses).all()
print("trained on images of the classes", *images.class_names)
