"""Files bring a model back, plain or in any cut."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tests.helpers.zoo import ZOO, floats

layers = keras.layers


SAVED = {
    name: ZOO[name]
    for name in (
        "u_net_normalised",
        "encoder_decoder",
        "operations",
        "siamese",
        "tied_reversible",
        "dicts",
        "tuples",
        "sequential",
    )
}


def moved(model):
    """Moves all weights from where they were made."""
    for variable in model.weights:
        variable.assign(variable + 0.1)


def outputs(model, x):
    return [y.numpy() for y in keras.tree.flatten(model(x, training=False))]


@pytest.mark.parametrize("name", ["u_net_normalised", "siamese", "tuples"])
def test_a_keras_file_brings_the_model_back(name, tmp_path):
    model = tfgpipe.pipeline(SAVED[name].make(), num_stages=3, num_microbatches=2)
    moved(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = SAVED[name].data(4)
    for a, b in zip(outputs(model, x), outputs(loaded, x), strict=True):
        np.testing.assert_array_equal(a, b)
    (layer,) = (x for x in loaded.layers if isinstance(x, tfgpipe.PipelinedLayer))
    assert layer.num_stages == 3
    layer.unpipelined().save(tmp_path / "plain.keras")
    plain = keras.models.load_model(tmp_path / "plain.keras")
    keras.tree.assert_same_structure(plain(x), loaded(x))


@pytest.mark.parametrize("name", ["u_net_normalised", "siamese", "dicts", "sequential"])
def test_weight_files_go_from_the_plain_model_to_any_cut_and_back(name, tmp_path):
    plain, two = compare.model_pair(SAVED[name].make, num_stages=2, num_microbatches=2)
    keras.utils.clear_session(free_memory=False)
    four = tfgpipe.pipeline(SAVED[name].make(), num_stages=4, num_microbatches=2)
    inner = [
        next(x for x in model.layers if isinstance(x, tfgpipe.PipelinedLayer))
        for model in (two, four)
    ]
    x = SAVED[name].data(4)
    path = tmp_path / "a.weights.h5"
    moved(plain)
    plain.save_weights(path)
    inner[0].unpipelined().load_weights(path)
    two.save_weights(tmp_path / "b.weights.h5")
    four.load_weights(tmp_path / "b.weights.h5")
    moved(four)
    inner[1].unpipelined().save_weights(path)
    for a, b in zip(outputs(plain, x), outputs(two, x), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)
    plain.load_weights(path)
    for a, b in zip(outputs(plain, x), outputs(four, x), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_a_layer_twice_in_a_list_is_once_in_a_file(tmp_path):
    twice = layers.Dense(4, activation="tanh")
    layer = tfgpipe.PipelinedLayer(
        [twice, layers.Dense(4), twice], balance=[1, 1, 1], num_microbatches=2
    )
    again = tfgpipe.PipelinedLayer.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert again.layers[0] is again.layers[2]
    assert again.layers[0] is not again.layers[1]
    model = keras.Sequential([keras.Input((4,)), layer])
    assert len(model.weights) == 4
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(floats(5, 4)), model(floats(5, 4)))
    assert len(loaded.weights) == 4


@keras.saving.register_keras_serializable(package="tests")
class Halves(layers.Layer):
    """Asks for a side input."""

    def build(self, shape):
        self.w = self.add_weight(shape=shape[-1:], name="w")

    def call(self, x, half=None):
        return x * self.w if half is None else x * self.w + half[:, None]


def test_a_layer_built_with_side_inputs_comes_back_from_a_file(tmp_path):
    inputs, half = keras.Input((4,)), keras.Input((), name="half")
    layer = tfgpipe.PipelinedLayer(
        [layers.Dense(4), Halves()], num_stages=2, num_microbatches=2
    )
    model = keras.Model([inputs, half], layer(inputs, half=half))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = [floats(5, 4), floats(5)]
    np.testing.assert_array_equal(loaded(x), model(x))
