"""A Functional model of your own, with branches and two outputs, in three stages.

    python examples/functional_model.py

It needs no GPU, takes 15 seconds, and ends with:

    3 stages, 4 microbatches of 8 examples, remat=stage, schedule=1f1b, partition as given
    stage  layers                 parameters   FLOPs     memory   receives  share
    0      conv2d_6, conv2d_7          2,768  45.2 M  371.2 KiB        0 B  22.9%
    1      conv2d_8, conv2d_9          4,640  75.9 M  584.5 KiB  128.0 KiB  38.5%
    2      conv2d_10 .. kind (9)       7,092  76.2 M  755.1 KiB  256.0 KiB  38.6%
    imbalance 1.159, bubble 38.2%, 755.1 KiB on the fullest device
    kind_accuracy  plain 1.00  pipeline 1.00
    kind_loss      plain 0.39  pipeline 0.39
    loss           plain 0.81  pipeline 0.81
    price_loss     plain 0.42  pipeline 0.42
    After five epochs all weights equal those of the plain model.
"""

import keras
import numpy as np

import tfgpipe

tfgpipe.make_logical_cpus(3)  # Three devices. With GPUs leave this line out.


def make_model() -> keras.Model:
    """Returns a model of two inputs, a skip connection, and two outputs."""
    keras.utils.set_random_seed(0)
    image = keras.Input((16, 16, 3), name="image")
    facts = keras.Input((4,), name="facts")
    x = stem = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(image)
    for _ in range(5):
        x = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    x = keras.layers.GlobalAveragePooling2D()(x + stem)
    y = keras.layers.Dense(16, activation="relu")(facts)
    y = keras.layers.Concatenate()([x, y])
    y = keras.layers.Dense(64, activation="relu")(y)
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(y)
    price = keras.layers.Dense(1, name="price")(y)
    model = keras.Model(
        {"image": image, "facts": facts}, {"kind": kind, "price": price}, name="houses"
    )
    losses = {"kind": "sparse_categorical_crossentropy", "price": "mse"}
    model.compile(
        keras.optimizers.Adam(1e-2, epsilon=1e-3), losses, metrics={"kind": "accuracy"}
    )
    return model


random = np.random.default_rng(0)
facts = random.normal(size=(96, 4)).astype("float32")
kinds = facts.argmax(axis=1) % 3
images = random.normal(size=(96, 16, 16, 3)) + kinds[:, None, None, None]
x = {"image": images.astype("float32"), "facts": facts}
y = {"kind": kinds, "price": facts.sum(axis=1, keepdims=True)}

plain = make_model()
# A compiled model gives a compiled pipeline. The layers of each stage are chosen so
# that the slowest stage, counted in floating point operations, is as fast as can be.
pipelined = tfgpipe.pipeline(
    make_model(), num_stages=3, num_microbatches=4, balance="flops", schedule="1f1b"
)

arguments = {"batch_size": 32, "epochs": 5, "shuffle": False, "verbose": 0}
expected = plain.fit(x, y, **arguments).history
received = pipelined.fit(x, y, **arguments).history

print(pipelined.plan(batch_size=32))
for name in expected:
    np.testing.assert_allclose(received[name], expected[name], rtol=1e-3, atol=1e-4)
    print(
        f"{name:14} plain {expected[name][-1]:.2f}  pipeline {received[name][-1]:.2f}"
    )
for a, b in zip(plain.get_weights(), pipelined.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
print("After five epochs all weights equal those of the plain model.")
