"""Files bring a model back, plain or in any cut."""

from __future__ import annotations

import io
import zipfile

import h5py
import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tests.helpers.marks import nightly
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


@pytest.mark.parametrize(
    "name", nightly(SAVED, gate=["u_net_normalised", "siamese", "tuples"])
)
def test_a_keras_file_brings_the_model_back(name, tmp_path):
    model = tfgpipe.pipeline(SAVED[name].make(), num_stages=3, num_microbatches=2)
    moved(model)
    loaded = compare.reloaded(model, tmp_path)
    x = SAVED[name].data(4)
    compare.assert_equal(outputs(model, x), outputs(loaded, x))
    (layer,) = (x for x in loaded.layers if isinstance(x, tfgpipe.PipelinedLayer))
    assert layer.num_stages == 3
    plain = compare.reloaded(layer.unpipelined(), tmp_path)
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
    compare.assert_allclose(outputs(plain, x), outputs(two, x), 1e-5, 1e-6)
    plain.load_weights(path)
    compare.assert_allclose(outputs(plain, x), outputs(four, x), 1e-5, 1e-6)


def test_a_layer_twice_in_a_list_is_once_in_a_file(tmp_path):
    twice = layers.Dense(4, activation="tanh")
    layer = tfgpipe.PipelinedLayer(
        [twice, layers.Dense(4), twice], partition=[1, 1, 1], num_microbatches=2
    )
    again = tfgpipe.PipelinedLayer.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert again.layers[0] is again.layers[2]
    assert again.layers[0] is not again.layers[1]
    model = keras.Sequential([keras.Input((4,)), layer])
    assert len(model.weights) == 4
    loaded = compare.reloaded(model, tmp_path)
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
    loaded = compare.reloaded(model, tmp_path)
    x = [floats(5, 4), floats(5)]
    np.testing.assert_array_equal(loaded(x), model(x))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_file_holds_the_numbers_of_training_and_training_goes_on(schedule, tmp_path):
    """Two weights of one number each, `y = b a x`, with momentum, by hand."""
    model = tfgpipe.PipelinedModel(
        [layers.Dense(1, use_bias=False, name=name) for name in "ab"],
        num_stages=2,
        num_microbatches=2,
        schedule=schedule,
    )
    model.build((None, 1))
    model.set_weights([np.array([[3.0]]), np.array([[1.0]])])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse")
    x, y = np.array([[1.0], [2.0]]), np.zeros((2, 1))
    assert model.train_on_batch(x, y) == pytest.approx(9 * 2.5)
    # Gradients are 5 a b^2 and 5 a^2 b: 15 and 45.
    path = tmp_path / "model.keras"
    model.save(path)
    with (
        zipfile.ZipFile(path) as archive,
        h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file,
    ):
        found = []
        file.visititems(
            lambda _, x: (
                found.append(x[()].item()) if isinstance(x, h5py.Dataset) else None
            )
        )
    # Weights, their velocities, the learning rate and the number of steps, each once.
    expected = [-0.45, -0.15, 0.01, 0.55, 1, 2.85]
    assert sorted(found) == pytest.approx(expected)
    loaded = keras.models.load_model(path)
    assert loaded.train_on_batch(x, y) == pytest.approx((2.85 * 0.55) ** 2 * 2.5)
    # Velocities -0.075 - 0.01 * 5 * 2.85 * 0.55^2 and -0.225 - 0.05 * 2.85^2 * 0.55.
    weights = [w.item() for w in loaded.get_weights()]
    assert weights == pytest.approx([2.85 - 0.11810625, 0.55 - 0.44836875])
