"""Quantization-aware training in two stages, and the int8 file for TFLite.

    python examples/quantize_int8.py [FILE]

It needs no GPU but scikit-learn, takes 15 seconds, writes FILE (`digits.tflite`), and
ends with:

    identical outputs       5157 of 5170
                            99.75%
    largest difference      1 LSB
    accuracy of the model   90.72%
    accuracy of the file    90.72%
    file                    29.2 KiB
    operations with floats  0 of 3
    the file has 0.29 of the weights' bytes in float32
"""

import sys
from pathlib import Path

import keras
from sklearn import datasets

import tfgpipe
from tfgpipe import quantization

tfgpipe.make_logical_cpus(2)
keras.utils.set_random_seed(0)
path = Path(sys.argv[1] if len(sys.argv) > 1 else "digits.tflite")

images, labels = datasets.load_digits(return_X_y=True)  # Comes with scikit-learn.
images = (images / 16).astype("float32")
train, test = slice(0, 1280), slice(1280, None)

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
)
# A copy of the model that rounds weights and activations to 256 levels. The first
# observed ranges count fully, since the training is short.
scheme = quantization.default_8bit(
    activations=quantization.MovingAverageRange(decay=0.99, ramp=True)
)
pipelined = tfgpipe.pipeline(
    quantization.apply(model, scheme=scheme),
    num_stages=2,
    num_microbatches=4,
    schedule="1f1b",
)
pipelined.compile(
    keras.optimizers.Adam(3e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
pipelined.fit(images[train], labels[train], batch_size=64, epochs=6, verbose=0)

tfgpipe.export_int8(pipelined, path)
result = quantization.compare(pipelined, path, (images[test], labels[test]))
print(result)
assert result.largest_difference <= 1
assert result.identical > 0.9
floats = 4 * model.count_params()
print(
    f"the file has {path.stat().st_size / floats:.2f} of the weights' bytes in float32"
)
