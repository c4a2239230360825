"""Moving averages that move once a step, against the layer of Keras.

A pipeline normalises each microbatch on its own, so a reference has to as well: it is
Keras' layer, called on the microbatches one after another for what it returns, and on
the mini-batch for what its averages become.
"""

from __future__ import annotations

import functools
import itertools
import json
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.layer_stacks import REMAT_MODES
from tests.helpers.marks import nightly
from tests.helpers.reference import DeferredNorm
from tfgpipe.stage import normalization

layers = keras.layers


def stack(norm):
    """Returns layers whose normalizations `norm` makes, given a momentum."""
    # A bias before a normalization would have nothing but rounding as its gradient.
    return [
        layers.Dense(6, use_bias=False),
        norm(momentum=0.9),
        layers.Activation("relu"),
        layers.Dense(4, use_bias=False),
        norm(momentum=0.6),
        layers.Dense(3),
    ]


def pair(num_microbatches, make=stack, shape=(5,), dtype="float32", **arguments):
    """Returns a plain model with references, and a pipeline of deferred layers."""
    reference = functools.partial(DeferredNorm, num_microbatches)
    plain = compare.plain_model(lambda: make(reference), shape, dtype)
    pipelined = compare.pipelined_model(
        lambda: make(normalization.DeferredBatchNormalization),
        shape,
        dtype,
        num_microbatches=num_microbatches,
        **{"num_stages": 2, **arguments},
    )
    compare.copy_state(plain, pipelined)
    return plain, pipelined


def data(rows, *shape, offset=2.0, dtype="float32"):
    rng = np.random.default_rng(rows)
    return (offset + 3 * rng.standard_normal((rows, *shape))).astype(dtype)


@pytest.mark.parametrize(
    ("remat", "num_microbatches"),
    [
        ("layer", 3),
        ("none", 5),
        *nightly([("stage", 3), ("except_last", 2), ("stage", 1)]),
    ],
)
def test_gradients_and_averages_are_those_of_the_reference(remat, num_microbatches):
    plain, pipelined = pair(num_microbatches, remat=remat)
    for rows in (7, 8):  # The second step starts from what the first one left.
        x = data(rows, 5)
        compare.assert_runs_the_same(plain, pipelined, x)


@pytest.mark.parametrize("remat", nightly(REMAT_MODES, gate=["stage"]))
def test_an_unknown_batch_size_and_an_empty_microbatch(remat):
    plain, pipelined = pair(3, remat=remat)
    x = data(2, 5)
    compare.assert_runs_the_same(plain, pipelined, x, specs=[tf.TensorSpec([None, 5])])


@pytest.mark.parametrize(("graph", "jit_compile"), [(False, False), (True, True)])
def test_eagerly_and_compiled(graph, jit_compile):
    plain, pipelined = pair(3, jit_compile=jit_compile)
    x = data(6, 5)
    compare.assert_same(
        compare.run(plain, x, graph=graph), compare.run(pipelined, x, graph=graph)
    )


@pytest.mark.parametrize("remat", ["stage", *nightly(["layer"])])
def test_double_precision_leaves_nothing_to_tolerance(remat):
    def make(norm):
        return stack(functools.partial(norm, dtype="float64"))

    keras.config.set_floatx("float64")
    try:
        plain, pipelined = pair(3, make, dtype="float64", remat=remat)
        x = data(7, 5, dtype="float64")
        rtol, atol = compare.TOLERANCES["float64"]
        runs = [compare.run(plain, x, graph=False), compare.run(pipelined, x)]
        compare.assert_same(*runs, rtol=rtol, atol=atol)
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.parametrize("remat", ["stage", *nightly(["layer"])])
def test_five_steps_of_an_optimizer(remat):
    plain, pipelined = pair(3, remat=remat)
    for model in (plain, pipelined):
        eagerly = model is plain
        model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=eagerly)
        # Batches of 8, 8, 8, 8 and 3 rows.
        model.fit(data(35, 5), data(35, 3), batch_size=8, shuffle=False, verbose=0)
    compare.assert_close(plain.variables, pipelined.variables, 1e-5, 1e-5)


def averages(layer):
    return [layer.moving_mean.numpy(), layer.moving_variance.numpy()]


@pytest.mark.parametrize(
    ("num_microbatches", "shape", "arguments"),
    [
        (1, (5,), {"momentum": 0.5}),
        (3, (5,), {"momentum": 0.0}),
        (2, (4, 6, 3), {"axis": 1}),
        (8, (5,), {"center": False, "scale": False}),
        *nightly(
            [
                (2, (5,), {"momentum": 0.5}),
                (5, (5,), {"momentum": 0.99}),
                (3, (5,), {"momentum": 1.0}),
                (3, (4, 6, 3), {}),
            ]
        ),
    ],
)
def test_averages_are_those_of_the_plain_layer(num_microbatches, shape, arguments):
    plain = layers.BatchNormalization(**arguments)
    deferred = normalization.DeferredBatchNormalization(**arguments)
    pipelined = tfgpipe.PipelinedLayer(
        [deferred, layers.Activation("relu")],
        num_stages=2,
        num_microbatches=num_microbatches,
    )
    for step, rows in enumerate((8, 7, 8)):
        x = data(rows, *shape, offset=step)
        plain(x, training=True)
        pipelined(x, training=True)
        for a, b in zip(averages(plain), averages(deferred), strict=True):
            compare.close(a, b, f"step {step}", compare.RTOL, compare.ATOL)


@pytest.mark.parametrize("remat", ["stage", *nightly(["layer"])])
def test_masked_positions_do_not_count(remat):
    def make(norm):
        return [layers.Masking(), norm(momentum=0.8), layers.Dense(2)]

    plain, pipelined = pair(3, make, (4, 5), remat=remat)
    x = data(6, 4, 5)
    x[1, 2:] = x[2:4] = x[5, 0] = 0.0  # All of the second microbatch is masked.
    compare.assert_runs_the_same(plain, pipelined, x)


def test_a_layer_that_is_frozen_or_in_inference_normalises_by_its_averages():
    plain, pipelined = pair(2)
    x = data(6, 5)
    for training, trainable in ((False, True), (True, False)):
        for norm in (plain.layers[1].norm, pipelined.layers[0].layers[1]):
            norm.trainable = trainable
        before = averages(pipelined.layers[0].layers[1])
        compare.assert_runs_the_same(plain, pipelined, x, training=training)
        np.testing.assert_array_equal(before, averages(pipelined.layers[0].layers[1]))


@pytest.mark.parametrize("remat", ["layer", *nightly(["stage"])])
def test_a_layer_called_twice_moves_its_averages_twice(remat):
    def model(norm):
        inputs = keras.Input((5,))
        hidden = layers.Dense(5)(norm(inputs))
        return keras.Model(inputs, layers.Dense(2)(norm(hidden + 1.0)))

    plain = model(DeferredNorm(3, momentum=0.8))
    pipelined = tfgpipe.pipeline(
        model(normalization.DeferredBatchNormalization(momentum=0.8)),
        num_stages=2,
        num_microbatches=3,
        remat=remat,
    )
    compare.copy_state(plain, pipelined)
    x = data(7, 5)
    compare.assert_runs_the_same(plain, pipelined, x)


def test_each_time_step_of_a_time_distributed_layer_moves_the_averages():
    plain = layers.BatchNormalization(momentum=0.8)
    deferred = normalization.DeferredBatchNormalization(momentum=0.8)
    pipelined = tfgpipe.PipelinedLayer(
        [layers.TimeDistributed(deferred), layers.Dense(2)],
        num_stages=2,
        num_microbatches=3,
    )
    x = data(7, 4, 5)
    layers.TimeDistributed(plain)(x, training=True)
    pipelined(x, training=True)
    compare.assert_close(averages(plain), averages(deferred))


@pytest.mark.parametrize("momentum", [0.9, *nightly([1.0])])
def test_outside_a_pipeline_it_is_the_layer_of_keras(momentum):
    def fitted(norm):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4), norm])
        model.compile("sgd", "mse")
        model.fit(data(16, 5), data(16, 4), batch_size=8, verbose=0)
        x = data(3, 5)
        eager = [model(x, training=training) for training in (False, True)]
        return [*eager, *compare.values(model)]

    received = fitted(normalization.DeferredBatchNormalization(momentum=momentum))
    expected = fitted(layers.BatchNormalization(momentum=momentum))
    compare.assert_equal(expected, received)


def test_names_config_and_weights_are_those_of_the_plain_layer():
    plain = layers.BatchNormalization(momentum=0.7, axis=1, name="norm")
    deferred = normalization.DeferredBatchNormalization(
        momentum=0.7, axis=1, name="norm"
    )
    assert deferred.get_config() == plain.get_config()
    assert normalization.DeferredBatchNormalization().name == "batch_normalization"
    for layer in (plain, deferred):
        layer.build((None, 3))
    assert [v.path for v in deferred.weights] == [v.path for v in plain.weights]
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(deferred)
    )
    assert type(again) is normalization.DeferredBatchNormalization
    assert again.momentum == 0.7


@pytest.mark.parametrize("swapped", [False, True])
def test_files_of_weights_fit_the_plain_layer(tmp_path, swapped):
    kinds = [layers.BatchNormalization, normalization.DeferredBatchNormalization]
    source, target = [
        keras.Sequential([keras.Input((5,)), *stack(kind)])
        for kind in (reversed(kinds) if swapped else kinds)
    ]
    source(data(8, 5), training=True)
    source.save_weights(tmp_path / "of.weights.h5")
    target.load_weights(tmp_path / "of.weights.h5")
    compare.assert_equal(compare.values(source), compare.values(target))


def test_a_saved_model_has_the_layer_again(tmp_path):
    _, pipelined = pair(2)
    pipelined(data(8, 5), training=True)
    again = compare.reloaded(pipelined, tmp_path)
    assert type(again.layers[0].layers[1]) is normalization.DeferredBatchNormalization
    compare.assert_equal(compare.values(pipelined), compare.values(again))


def test_renormalising_is_refused():
    with pytest.raises(ValueError, match=r"'norm' .* received renorm=True. Use `keras"):
        normalization.DeferredBatchNormalization(renorm=True, name="norm").build(
            (None, 3)
        )


# Conversion of Keras' own layers: `batch_norm="deferred"`.


class Block(layers.Layer):
    """Normalizations inside a user's layer, one that learns and one that does not."""

    def __init__(self, norm=layers.BatchNormalization, **kwargs):
        super().__init__(**kwargs)
        self.norms = [norm(momentum=0.9), norm(momentum=0.7)]
        self.inner = layers.Dense(5)

    def build(self, shape):
        for part in (*self.norms, self.inner):
            part.build(shape)

    def call(self, x, training=None):
        hidden = self.norms[0](self.inner(x), training=training)
        return hidden + self.norms[1](x, training=False)

    def get_config(self):
        return super().get_config()


def listed(norm):
    return [layers.Dense(5), norm(), Block(norm), layers.Dense(2)]


def functional(norm):
    inputs = keras.Input((5,))
    hidden = norm(name="outer")(layers.Dense(5)(inputs))
    x = keras.Input((5,))
    nested = keras.Model(x, layers.Dense(5)(norm(name="nested")(x)))
    outputs = layers.Dense(2)(Block(norm)(nested(hidden)) + hidden)
    return keras.Model(inputs, outputs)


def norms(layer):
    """Returns the normalizations in a layer, in order of their variables."""
    found = normalization.batch_norms([layer])
    return sorted(found, key=lambda norm: norm.name)


@pytest.mark.parametrize(
    ("make", "remat"),
    nightly(
        itertools.product([listed, functional], ["stage", "layer"]),
        gate=[(listed, "layer"), (functional, "stage")],
    ),
)
def test_converted_layers_do_as_deferred_ones(make, remat):
    def pipelined(norm, batch_norm):
        keras.utils.set_random_seed(0)
        layer = tfgpipe.PipelinedLayer(
            make(norm),
            num_stages=2,
            num_microbatches=3,
            remat=remat,
            batch_norm=batch_norm,
        )
        layer.build((None, 5))
        return layer

    converted = pipelined(layers.BatchNormalization, "deferred")
    deferred = pipelined(normalization.DeferredBatchNormalization, "microbatch")
    x = data(7, 5)
    runs = [compare.run(layer, x, times=2) for layer in (deferred, converted)]
    compare.assert_same(*runs, rtol=0, atol=0)
    moved = [norm.moving_mean.numpy().any() for norm in norms(converted)]
    assert sorted(moved) == [False] + [True] * (len(moved) - 1)


@pytest.mark.parametrize("make", [listed, functional])
def test_converting_leaves_plain_layers_behind(make, tmp_path):
    original = make(layers.BatchNormalization)
    arguments = {"num_microbatches": 2, "batch_norm": "deferred"}
    layer = tfgpipe.PipelinedLayer(original, num_stages=2, **arguments)
    for rows in (8, 5):
        layer(data(rows, 5), training=True)
    plain = layer.unpipelined()
    found = norms(plain)
    assert len(found) == (3 if make is listed else 4)
    assert {type(norm) for norm in found} == {layers.BatchNormalization}
    assert found == norms(layer)
    x = data(4, 5)
    np.testing.assert_allclose(plain(x), layer(x), rtol=1e-5, atol=1e-5)
    plain.save(tmp_path / "of.keras")
    with zipfile.ZipFile(tmp_path / "of.keras") as saved:
        assert "tfgpipe" not in saved.read("config.json").decode()


def test_a_failing_trace_leaves_plain_layers_behind():
    class Fails(layers.Layer):
        def call(self, x, training=None):
            if training:
                raise ValueError("Not in training.")
            return x

    norm = layers.BatchNormalization()
    layer = tfgpipe.PipelinedLayer(
        [norm, Fails()], num_stages=1, num_microbatches=2, batch_norm="deferred"
    )
    with pytest.raises(ValueError, match="Not in training"):
        layer(data(4, 5), training=True)
    assert type(norm) is layers.BatchNormalization


def test_the_choice_is_in_the_config():
    arguments = {"num_stages": 1, "num_microbatches": 2}
    for choice in ("deferred", "microbatch"):
        layer = tfgpipe.PipelinedLayer(
            [layers.Dense(2)], batch_norm=choice, **arguments
        )
        again = tfgpipe.PipelinedLayer.from_config(
            json.loads(json.dumps(layer.get_config()))
        )
        assert again.config.batch_norm == choice
    with pytest.raises(ValueError, match=r"`batch_norm` must be one of 'microbatch'"):
        tfgpipe.PipelinedLayer([layers.Dense(2)], batch_norm="once", **arguments)


# The warning.


def built(make, num_microbatches=2, **arguments):
    layer = tfgpipe.PipelinedLayer(
        make, num_stages=1, num_microbatches=num_microbatches, **arguments
    )
    layer.build((None, 5))
    return layer


def test_averages_that_move_once_a_microbatch_are_warned_of():
    found = [layers.BatchNormalization(name=f"norm_{i}") for i in range(5)]
    with pytest.warns(UserWarning, match="one microbatch at a time") as caught:
        built(found)
    (warning,) = caught
    message = str(warning.message)
    assert "the moving averages move once for each" in message
    assert "5 such layers: 'norm_0', 'norm_1', 'norm_2' and 2 more." in message
    for way_out in ('`batch_norm="deferred"`', "`num_microbatches=1`", "GroupNorm"):
        assert way_out in message


@pytest.mark.filterwarnings("error")
def test_averages_that_move_as_unpipelined_are_not_warned_of():
    frozen = layers.BatchNormalization()
    frozen.trainable = False
    built([layers.BatchNormalization()], num_microbatches=1)
    built([layers.BatchNormalization()], batch_norm="deferred")
    built([normalization.DeferredBatchNormalization(), frozen])


def test_layers_that_cannot_be_converted_are_warned_of():
    class Own(layers.BatchNormalization):
        pass

    found = [layers.BatchNormalization(), Own(name="own")]
    found.append(layers.BatchNormalization(renorm=True, name="renorm"))
    with pytest.warns(UserWarning, match=r"2 such layers: 'own', 'renorm'\. These"):
        built(found, batch_norm="deferred")


# Replicas.


@pytest.mark.parametrize("num_microbatches", [3, *nightly([1])])
def test_replicas_average_their_averages_as_keras_does(num_microbatches):
    def fitted(strategy, make):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((5,)), make()])
            model.compile("sgd", "mse")
        model.fit(data(24, 5), data(24, 5), batch_size=12, shuffle=False, verbose=0)
        return compare.values(model)

    expected = fitted(
        compare.mirrored(2),
        lambda: DeferredNorm(num_microbatches, momentum=0.5),
    )
    received = fitted(
        tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2),
        lambda: tfgpipe.PipelinedLayer(
            [normalization.DeferredBatchNormalization(momentum=0.5)],
            num_microbatches=num_microbatches,
        ),
    )
    compare.assert_close(expected, received)
