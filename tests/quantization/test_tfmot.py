"""tensorflow-model-optimization as the oracle, and as a guest.

Its own `quantize_model` on the Keras of old is trained beside ours in one process, on
the same weights and data, and has to agree in every bit: what differs between the two
Kerases is left out of the models, which is batch normalization alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tfgpipe import quantization
from tfgpipe.quantization import from_tfmot, tfmot

STEPS = 100


@pytest.fixture(scope="module")
def guest():
    """The library, and the Keras of old."""
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


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("make", [perceptron, convolutions, branches])
def test_a_hundred_steps_are_those_of_tfmot(make, num_stages, guest):
    theirs = make(guest)
    plain = make(keras)
    copy_weights(theirs, plain)
    ours = quantization.apply(plain, range_update="per_call")
    pipelined = tfgpipe.pipeline(ours, num_stages=num_stages, num_microbatches=1)
    theirs = tfmot.library().quantize_model(theirs)
    assert_equal_training(pipelined.pipelined, theirs)


@pytest.mark.parametrize("kind", ["configurations", "quantizers"])
def test_its_own_quantizers_do_the_same_as_guests(kind, guest):
    theirs = perceptron(guest)
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
    assert_equal_training(layer, theirs)


def test_guests_are_saved_and_loaded(guest, tmp_path):
    model = tfmot.library().quantize_model(perceptron(guest))
    config = model.layers[1].quantize_config
    layers = [
        quantization.annotate(keras.layers.Dense(4, activation="relu"), x)
        for x in (from_tfmot(config), None)
    ]
    model = keras.Sequential(
        [
            keras.Input((4,)),
            *quantization.apply(layers, range_update="per_call"),
        ]
    )
    x = np.random.default_rng(0).standard_normal((6, 4), dtype=np.float32)
    model(x, training=True)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    np.testing.assert_array_equal(loaded(x), model(x))


def test_a_quantizer_of_ones_own_needs_its_class_to_be_loaded(guest, tmp_path):
    class Clips(tfmot.library().quantizers.Quantizer):
        """As the guide of tfmot has it."""

        def build(self, tensor_shape, name, layer):
            initializer = guest.initializers.Constant(2.0)
            variable = layer.add_weight(
                name + "_range", initializer=initializer, trainable=False
            )
            return {"range": variable}

        def __call__(self, inputs, training, weights, **kwargs):
            return tf.clip_by_value(inputs, 0.0, weights["range"])

        def get_config(self):
            return {}

    config = quantization.QuantizeConfig(output=from_tfmot(Clips()))
    layer = quantization.QuantizeWrapper(
        keras.layers.Identity(), config, range_update="per_call"
    )
    model = keras.Sequential([keras.Input((3,)), layer])
    x = np.array([[-1.0, 1.0, 5.0]], "float32")
    np.testing.assert_array_equal(model(x), [[0.0, 1.0, 2.0]])
    path = tmp_path / "model.keras"
    model.save(path)
    with pytest.raises((ValueError, TypeError), match="custom_object_scope"):
        keras.models.load_model(path)
    with keras.saving.custom_object_scope({"Clips": Clips}):
        loaded = keras.models.load_model(path, safe_mode=False)
    np.testing.assert_array_equal(loaded(x), model(x))


_LIBRARY = "tensorflow_model_optimization.python.core.quantization.keras"


def _payload(tf_keras: Any, marker: Path) -> dict[str, Any]:
    """Returns a layer whose function, once it runs, makes a file."""
    code = f"lambda x: (open({str(marker)!r}, 'w').close(), x)[1]"
    model = tf_keras.Sequential(
        [tf_keras.Input((3,)), tf_keras.layers.Lambda(eval(code))]
    )
    layer = tf_keras.layers.serialize(model, use_legacy_format=True)
    for each in layer["config"]["layers"]:
        # Of the format before, in which `tf_keras` runs what a file holds.
        del each["module"], each["registered_name"]
    marker.unlink()
    return {"layer": layer, "quantize_config": None, "name": "wrapped"}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (f"{_LIBRARY}.quantize_wrapper", "QuantizeWrapperV2"),
        (f"{_LIBRARY}.quantize_config", "FixedQuantizeConfig"),
        (f"{_LIBRARY}.quantizers", "QuantizeConfig"),
        (f"{_LIBRARY}.quantizers", "tf"),
        ("tensorflow_model_optimization.python.core.keras.compat", "keras"),
        ("os", "system"),
        (None, "MovingAverageQuantizer"),
        (f"{_LIBRARY}.quantizers", ["LastValueQuantizer"]),
        ("builtins", "tfgpipe>QuantizeWrapper"),
    ],
)
def test_a_file_reaches_nothing_but_quantizers(module, name, guest, tmp_path):
    quantizer = tfmot.library().quantizers.LastValueQuantizer(8, False, True, True)
    layer = quantization.QuantizeWrapper(
        keras.layers.Identity(),
        quantization.QuantizeConfig(output=from_tfmot(quantizer)),
        range_update="per_call",
    )
    genuine, hostile = tmp_path / "genuine.keras", tmp_path / "hostile.keras"
    keras.Sequential([keras.Input((3,)), layer]).save(genuine)
    marker = tmp_path / "ran"
    given = {
        "module": module,
        "class_name": name,
        "config": _payload(guest, marker),
    }

    def changed(config: Any) -> Any:
        if isinstance(config, dict):
            if config.get("class_name") == "LastValueQuantizer":
                return given
            return {key: changed(value) for key, value in config.items()}
        return [changed(x) for x in config] if isinstance(config, list) else config

    with zipfile.ZipFile(genuine) as old, zipfile.ZipFile(hostile, "w") as new:
        for entry in old.namelist():
            data = old.read(entry)
            if entry == "config.json":
                config = changed(json.loads(data))
                assert str(given) in str(config)
                data = json.dumps(config).encode()
            new.writestr(entry, data)
    with pytest.raises(
        (ValueError, TypeError), match="quantizer of tensorflow-model-optimization"
    ):
        keras.models.load_model(hostile)
    assert not marker.exists()


@pytest.mark.parametrize("registered", [False, True])
def test_a_class_of_tfmots_name_is_not_taken_for_one(registered, guest):
    class LastValueQuantizer:
        """It only has the name."""

        @classmethod
        def from_config(cls, config):
            raise AssertionError("it ran")

    there = {"LastValueQuantizer": LastValueQuantizer} if registered else {}
    config = {
        "module": __name__,
        "class_name": "LastValueQuantizer",
        "config": {},
    }
    with (
        keras.saving.custom_object_scope(there),
        pytest.raises(ValueError, match="A saved quantizer of tensorflow-mode"),
    ):
        tfmot.TfmotQuantizer.from_config({"quantizer": config})


def test_guests_move_their_ranges_themselves(guest):
    quantizer = tfmot.library().quantizers.LastValueQuantizer(8, False, True, True)
    config = quantization.QuantizeConfig(weights={"kernel": from_tfmot(quantizer)})
    layer = quantization.QuantizeWrapper(keras.layers.Dense(2, name="d"), config)
    with pytest.raises(ValueError, match=r"'kernel' of layer 'd'.*\"per_call\""):
        layer(np.ones((1, 2), "float32"))


def test_only_guests_are_taken():
    with pytest.raises(TypeError, match=r"Received 8 of type int"):
        from_tfmot(8)


def test_the_library_stays_out_until_it_is_asked_for_and_leaves_nothing_behind():
    code = """
import os, sys
import keras, tensorflow as tf, tfgpipe
from tfgpipe import quantization
quantization.apply([keras.layers.Dense(2)])
assert not [name for name in sys.modules if name.startswith("tensorflow_model_opt")]
assert "tf_keras" not in sys.modules
from tfgpipe.quantization import tfmot
tfmot.library()
assert "TF_USE_LEGACY_KERAS" not in os.environ
assert tf.keras.Model is keras.Model
os.environ["TF_USE_LEGACY_KERAS"] = "0"
tfmot.library.cache_clear()
tfmot.library()
assert os.environ["TF_USE_LEGACY_KERAS"] == "0"
"""
    environment = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


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


def assert_equal_training(ours: Any, theirs: Any) -> None:
    """Asserts that losses, gradients, weights and ranges agree in every bit."""
    rng = np.random.default_rng(0)
    shape = theirs.input_shape[1:]
    x = 3 * rng.standard_normal((32, *shape), dtype=np.float32)
    y = rng.standard_normal((32, 4), dtype=np.float32)
    steps = [trains(ours, keras.Variable.value.fget), trains(theirs, lambda v: v)]
    for _ in range(STEPS):
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
