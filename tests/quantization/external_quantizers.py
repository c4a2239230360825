"""Models for both Kerases, trained beside `quantize_model` of tfmot.

Its own `quantize_model` on the Keras of old is trained beside ours in one process, on
the same weights and data, and has to agree in every bit: what differs between the two
Kerases is left out of the models, which is batch normalization alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tfgpipe import quantization
from tfgpipe.quantization import from_tfmot, tfmot


def library_keras() -> Any:
    """Returns the Keras of old, which the library is written for."""
    tfmot.library()
    import tf_keras

    return tf_keras


def perceptron(k: Any) -> Any:
    layers = k.layers
    return k.Sequential(
        [
            k.Input((8,)),
            layers.Dense(16, activation="relu", name="a"),
            layers.Dropout(0.0, name="dropped"),
            layers.Dense(8, activation="tanh", name="b"),
            layers.Dense(8, activation="sigmoid", name="c"),
            layers.Dense(4, activation="softmax", name="d"),
        ]
    )


def convolutions(k: Any) -> Any:
    layers = k.layers
    inputs = k.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="a")(inputs)
    y = layers.Conv2D(4, 3, padding="same", name="b")(x)
    x = layers.Add(name="sum")([x, y])
    x = layers.ReLU(name="relu")(x)
    x = layers.MaxPooling2D(name="pool")(x)
    x = layers.DepthwiseConv2D(3, name="c")(x)
    x = layers.Activation("relu", name="other_relu")(layers.Add(name="twice")([x, x]))
    x = layers.GlobalAveragePooling2D(name="mean")(x)
    return k.Model(inputs, layers.Dense(4, name="d")(x))


def branches(k: Any) -> Any:
    layers = k.layers
    inputs = k.Input((8,))
    a = layers.Dense(8, name="a")(inputs)
    b = layers.Dense(8, activation="relu", name="b")(inputs)
    x = layers.ReLU(name="relu")(layers.Add(name="sum")([a, b]))
    x = layers.Concatenate(name="joined")([x, layers.Dense(4, name="c")(x)])
    x = layers.Reshape((3, 4), name="shaped")(x)
    x = layers.AveragePooling1D(3, name="mean")(x)
    return k.Model(inputs, layers.Dense(4, name="d")(layers.Flatten(name="f")(x)))


MODELS = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "branches": branches,
}


def assert_trains_as_tfmot(model: str, *, num_stages: int, num_steps: int) -> None:
    """Asserts that training is that of `quantize_model`, bit for bit.

    Args:
        model: One of `MODELS`.
        num_stages: K of ours.
        num_steps: Steps of gradient descent.
    """
    make, library = MODELS[model], library_keras()
    theirs = make(library)
    plain = make(keras)
    copy_weights(theirs, plain)
    ours = quantization.apply(plain, range_update="per_call")
    pipelined = tfgpipe.pipeline(ours, num_stages=num_stages, num_microbatches=1)
    theirs = tfmot.library().quantize_model(theirs)
    assert_equal_training(pipelined.pipelined, theirs, num_steps=num_steps)


def assert_external_quantizers_train_as_tfmot(kind: str, *, num_steps: int) -> None:
    """Asserts the same of ours with the quantizers of theirs.

    Args:
        kind: Whether layers are given its "configurations" or its "quantizers".
        num_steps: Steps of gradient descent.
    """
    library = library_keras()
    theirs = perceptron(library)
    plain = perceptron(keras)
    copy_weights(theirs, plain)
    theirs = tfmot.library().quantize_model(theirs)
    wrappers = {x.layer.name: x for x in theirs.layers if hasattr(x, "quantize_config")}

    def config(layer: keras.layers.Layer) -> quantization.QuantizeConfig:
        config = wrappers[layer.name].quantize_config
        if kind == "configurations" or not isinstance(layer, keras.layers.Dense):
            return from_tfmot(config)
        return quantization.QuantizeConfig(
            weights={"kernel": from_tfmot(config.weight_quantizer)},
            activations={"activation": from_tfmot(config.activation_quantizer)},
        )

    annotated = [quantization.annotate(x, config(x)) for x in plain.layers]
    ours = quantization.apply(
        annotated,
        scheme=quantization.default_8bit(inputs=from_tfmot(theirs.layers[0].quantizer)),
        range_update="per_call",
    )
    layer = tfgpipe.PipelinedLayer(ours, num_stages=2, num_microbatches=1)
    layer.build((None, 8))
    assert_equal_training(layer, theirs, num_steps=num_steps)


def copy_weights(theirs: Any, ours: keras.Model) -> None:
    values = {key(v.name): v.numpy() for v in theirs.variables}
    for variable in ours.variables:
        if variable.name != "seed_generator_state":
            variable.assign(values[key(variable.path)])


def key(path: str) -> str:
    """Returns by what name a variable goes here and there: layer and variable."""
    *_, layer, variable = path.partition(":")[0].split("/")
    # Inputs are quantized by a layer alone, which is named by the library.
    if "quantize_layer" in layer or "fake_quantize" in layer:
        return f"input/{variable.rpartition('_')[2]}"
    return f"{layer.removeprefix('quant_')}/{variable.removeprefix('depthwise_')}"


def assert_equal_training(ours: Any, theirs: Any, *, num_steps: int) -> None:
    """Asserts that losses, gradients, weights and ranges agree in every bit."""
    rng = np.random.default_rng(0)
    shape = theirs.input_shape[1:]
    x = 3 * rng.standard_normal((32, *shape), dtype=np.float32)
    y = rng.standard_normal((32, 4), dtype=np.float32)
    steps = [trains(ours, keras.Variable.value.fget), trains(theirs, lambda v: v)]
    for _ in range(num_steps):
        noisy = x + 0.1 * rng.standard_normal(x.shape, dtype=np.float32)
        (loss, *gradients), (their_loss, *their_gradients) = (
            step(noisy, y) for step in steps
        )
        assert loss.numpy() == their_loss.numpy()
        expected = named(theirs.trainable_variables, their_gradients)
        received = named(ours.trainable_variables, gradients)
        assert_same(expected, received)
        expected = named(theirs.variables, theirs.variables)
        received = named(ours.variables, ours.variables)
        assert any("_min" in name for name in expected)
        assert_same(expected, received)


def assert_same(
    expected: dict[str, np.ndarray], received: dict[str, np.ndarray]
) -> None:
    assert expected.keys() == received.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(received[name], value, name)


def named(variables: Any, values: Any) -> dict[str, np.ndarray]:
    paths = [getattr(v, "path", None) or v.name for v in variables]
    others = ("seed_generator_state", "optimizer_step:0", "num_updates")
    return {
        key(path): np.asarray(x)
        for path, x in zip(paths, values, strict=True)
        if not path.endswith(others)
    }


def trains(model: Any, value: Callable[[Any], Any]) -> Callable[..., list[tf.Tensor]]:
    """Returns a step of gradient descent, which returns loss and gradients."""

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        weights = model.trainable_variables
        gradients = tape.gradient(loss, [value(v) for v in weights])
        for variable, gradient in zip(weights, gradients, strict=True):
            variable.assign_sub(0.02 * gradient)
        return [loss, *gradients]

    return step
