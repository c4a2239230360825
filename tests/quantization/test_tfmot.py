"""tensorflow-model-optimization as the oracle, and as an external quantizer."""

from __future__ import annotations

import itertools
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.marks import nightly
from tests.helpers.subprocesses import interpret
from tests.quantization.external_quantizers import (
    MODELS,
    assert_external_quantizers_train_as_tfmot,
    assert_trains_as_tfmot,
    library_keras,
    perceptron,
)
from tfgpipe import quantization
from tfgpipe.capture.ir import Call
from tfgpipe.quantization import from_tfmot, tfmot
from tfgpipe.quantization.scheme import configs_of, default_8bit


@pytest.fixture(scope="module")
def tf_keras():
    """The library, and the Keras of old."""
    return library_keras()


@pytest.mark.parametrize(
    ("model", "num_stages", "num_steps"),
    nightly(
        itertools.product(MODELS, [1, 2], [100]),
        gate=[("convolutions", 2, 12), ("branches", 1, 12)],
    ),
)
def test_steps_are_those_of_tfmot(model, num_stages, num_steps):
    assert_trains_as_tfmot(model, num_stages=num_stages, num_steps=num_steps)


@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [("quantizers", 12), *nightly([("configurations", 100), ("quantizers", 100)])],
)
def test_external_quantizers_do_the_same(kind, num_steps):
    assert_external_quantizers_train_as_tfmot(kind, num_steps=num_steps)


def test_external_quantizers_are_saved_and_loaded(tf_keras, tmp_path):
    model = tfmot.library().quantize_model(perceptron(tf_keras))
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


def test_a_quantizer_of_ones_own_needs_its_class_to_be_loaded(tf_keras, tmp_path):
    class Clips(tfmot.library().quantizers.Quantizer):
        """As the guide of tfmot has it."""

        def build(self, tensor_shape, name, layer):
            initializer = tf_keras.initializers.Constant(2.0)
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


@pytest.fixture(scope="module")
def saved(tf_keras, tmp_path_factory):
    """A file with a quantizer; what is put in its place, and what that would make."""
    quantizer = tfmot.library().quantizers.LastValueQuantizer(8, False, True, True)
    layer = quantization.QuantizeWrapper(
        keras.layers.Identity(),
        quantization.QuantizeConfig(output=from_tfmot(quantizer)),
        range_update="per_call",
    )
    folder = tmp_path_factory.mktemp("saved")
    genuine, marker = folder / "genuine.keras", folder / "ran"
    keras.Sequential([keras.Input((3,)), layer]).save(genuine)
    return genuine, _payload(tf_keras, marker), marker


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
def test_a_file_reaches_nothing_but_quantizers(module, name, saved, tmp_path):
    genuine, payload, marker = saved
    hostile = tmp_path / "hostile.keras"
    given = {"module": module, "class_name": name, "config": payload}

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
def test_a_class_of_tfmots_name_is_not_taken_for_one(registered, tf_keras):
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


def test_external_quantizers_update_their_ranges_themselves(tf_keras):
    quantizer = tfmot.library().quantizers.LastValueQuantizer(8, False, True, True)
    config = quantization.QuantizeConfig(weights={"kernel": from_tfmot(quantizer)})
    layer = quantization.QuantizeWrapper(keras.layers.Dense(2, name="d"), config)
    with pytest.raises(ValueError, match=r"'kernel' of layer 'quant_d'.*\"per_call\""):
        layer(np.ones((1, 2), "float32"))


def test_only_quantizers_of_tfmot_are_taken():
    with pytest.raises(TypeError, match=r"Received 8 of type int"):
        from_tfmot(8)


@pytest.mark.nightly
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
    run = interpret(code, without={"TF_USE_LEGACY_KERAS"})
    assert run.returncode == 0, run.stderr


def test_the_library_leaves_the_keras_of_tensorflow(tf_keras):
    assert "TF_USE_LEGACY_KERAS" not in os.environ
    assert tf.keras.Model is keras.Model


def test_configurations_of_tfmot_choose_what_is_quantized(tf_keras):
    """Where layers are fused, or joined, a configuration of tfmot's stays whole."""

    class Config(tfmot.library().QuantizeConfig):
        def get_weights_and_quantizers(self, layer):
            return []

        def get_activations_and_quantizers(self, layer):
            return []

        def set_quantize_weights(self, layer, quantize_weights):
            pass

        def set_quantize_activations(self, layer, quantize_activations):
            pass

        def get_output_quantizers(self, layer):
            return []

        def get_config(self):
            return {}

    config = from_tfmot(Config())
    scheme = default_8bit().with_rule(keras.layers.Dense, config)
    product = keras.layers.Dense(2)
    for after in (keras.layers.ReLU(), keras.layers.Concatenate()):
        calls = [Call(product, (), {}, (0,), (1,)), Call(after, (), {}, (1,), (2,))]
        assert configs_of(calls, [2], scheme, {})[product] is config
