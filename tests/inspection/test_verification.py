"""`tfgpipe.verify`: what it finds equal, and what it says of the rest."""

import dataclasses
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, zoo
from tfgpipe.inspection import Comparison, Verification

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
GIVEN = {"num_stages": 2, "num_microbatches": 4}


def model(*more, dtype="float32", loss="mse"):
    """Returns Dense layers with others amid them."""
    made = keras.Sequential([keras.Input((8,), dtype=dtype)])
    for layer in (layers.Dense(8, activation="tanh", dtype=dtype), *more):
        made.add(layer)
    for _ in range(2):
        made.add(layers.Dense(8, dtype=dtype))
    made.compile(keras.optimizers.Adam(clipnorm=1.0), loss)
    return made


@pytest.mark.filterwarnings("ignore::UserWarning")
def verify(made, **options):
    return tfgpipe.verify(made, (X, X), **{**GIVEN, **options})


class Centred(layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


class Counting(layers.Layer):
    """Counts its calls in training."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x, training=None):
        if training:
            self.count.assign(self.count + 1)
        return x


class CountingRows(Counting):
    """Counts examples in training, however many there are at once."""

    def call(self, x, training=None):
        if training:
            self.count.assign(self.count + keras.ops.shape(x)[0])
        return x


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("float64", 1e-10)])
def test_an_equal_step_is_equal_in_all(dtype, most):
    verified = verify(model(dtype=dtype))
    assert verified.tolerance == most
    assert verified.is_equal
    assert verified.is_exact
    assert not verified.causes
    kinds = [x.kind for x in verified.comparisons]
    assert [kinds.count(kind) for kind in ("output", "loss", "gradient")] == [1, 1, 6]
    assert max(x.deviation for x in verified.comparisons) <= most
    assert "Equal to plain Keras but for rounding" in str(verified)


def test_the_gradients_are_those_of_a_tape():
    """By a pipeline whose codec rounds: how far it is off, worked out by a tape."""
    made = model()
    verified = verify(made, transfer_dtype="float16")
    grads = []
    for options in ({"transfer_dtype": "float16"}, {}):
        copy = keras.models.clone_model(made)
        compare.copy_state(made, copy)
        pipelined = tfgpipe.pipeline(copy, **GIVEN, **options)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((pipelined(X, training=True) - X) ** 2)
        grads.append(tape.gradient(loss, pipelined.trainable_variables))
    largest = max(float(tf.reduce_max(tf.abs(g))) for g in grads[1])
    found = [x.deviation for x in verified.comparisons if x.kind == "gradient"]
    for deviation, ours, plain in zip(found, *grads, strict=True):
        off = float(tf.reduce_max(tf.abs(ours - plain)))
        scale = max(float(tf.reduce_max(tf.abs(plain))), 0.01 * largest)
        assert deviation == pytest.approx(off / scale, abs=1e-5)
    assert not verified.is_exact
    assert "  transfer_dtype=float16 changes what is sent" in str(verified)
    assert "report" not in verified.verdict
    assert all(x.rounding < 1e-5 for x in verified.by_microbatch)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: layers.Dropout(0.5, seed=3), "draws random numbers"),
        (layers.BatchNormalization, "mixes examples"),
        (Centred, "mixes examples"),
        (Counting, "moves statistics"),
    ],
)
def test_layers_that_depend_on_the_microbatches_are_named(layer, why):
    first, second = layer(), layer()
    verified = verify(model(first, layers.Dense(8), second))
    assert not verified.is_equal
    assert verified.is_exact
    assert [x.layer for x in verified.causes] == [first.name, second.name]
    assert {x.why for x in verified.causes} == {why}
    assert all(x.deviation > verified.tolerance for x in verified.causes)
    assert "to plain Keras on the same 4 microbatches" in verified.verdict
    assert f"  {first.name} " in str(verified)
    assert f"  {second.name} " in str(verified)


def test_statistics_that_end_alike_are_no_reason():
    verified = verify(model(CountingRows(), layers.Dropout(0.5)))
    assert [x.why for x in verified.causes] == ["draws random numbers"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_averages_that_move_by_the_mini_batch_are_not_asked_of_microbatches():
    made = model(layers.BatchNormalization(), layers.BatchNormalization())
    verified = verify(made, batch_norm="deferred")
    assert verified.is_exact
    compared = {x.name.rpartition("/")[2] for x in verified.by_microbatch}
    assert "gamma" in compared
    assert "moving_mean" not in compared


def test_losses_that_layers_add_are_compared():
    verified = verify(
        model(
            layers.Dense(8, activity_regularizer="l2"),
            layers.Dense(8, kernel_regularizer="l2"),
            layers.Dropout(0.5),
        )
    )
    assert verified.is_exact
    assert [x.why for x in verified.causes] == ["draws random numbers"]


@pytest.fixture
def usual_policy():
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.usefixtures("usual_policy")
def test_half_precision_has_its_own_tolerance():
    keras.config.set_dtype_policy("mixed_float16")
    made = keras.Sequential([keras.Input((8,))])
    for _ in range(3):
        made.add(layers.Dense(8))
    made.compile("adam", "mse")
    assert isinstance(made.optimizer, keras.optimizers.LossScaleOptimizer)
    verified = verify(made)
    assert verified.tolerance == 2e-2
    assert verified.is_equal


@pytest.mark.usefixtures("usual_policy")
def test_a_step_that_float16_skips_is_no_equal_one():
    keras.config.set_dtype_policy("mixed_float16")
    made = keras.Sequential([keras.Input((8,)), *(layers.Dense(8) for _ in range(3))])
    made.compile("adam", lambda y, outputs: 1e5 * keras.ops.square(outputs))
    with pytest.raises(ValueError, match="gradients is not finite"):
        verify(made)


def test_the_model_stays_as_it_is():
    made = model(layers.BatchNormalization())
    before = compare.values(made)
    optimizer, loss = made.optimizer, made.loss
    verified = verify(made, num_stages=1, num_microbatches=1)
    assert verified.is_equal
    compare.assert_equal(before, made.variables)
    assert made.optimizer is optimizer
    assert made.loss is loss
    assert made.compiled


def test_a_pipeline_is_verified_with_its_own_options():
    pipelined = tfgpipe.pipeline(
        model(), num_stages=3, num_microbatches=4, schedule="zero_bubble"
    )
    before = compare.values(pipelined)
    verified = tfgpipe.verify(pipelined, (X, X))
    assert (verified.num_stages, verified.num_microbatches) == (3, 4)
    assert verified.is_equal
    compare.assert_equal(before, pipelined.variables)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["u_net_normalised", "optional_none", "dicts", "lstm"])
def test_whole_models_are_exact_and_equal_if_rows_are_independent(name):
    def make():
        made = zoo.ZOO[name].make()
        outputs = made.compute_output_spec(made.input)
        made.compile("sgd", keras.tree.map_structure(lambda _: "mse", outputs))
        return made

    x = zoo.ZOO[name].data(8)
    y = keras.tree.map_structure(lambda y: np.zeros(y.shape), make()(x))
    verified = tfgpipe.verify(make, (x, y), **GIVEN)
    assert verified.is_exact
    assert verified.is_equal == zoo.ZOO[name].rowwise


def strategy(**options):
    return tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2, **options)


@pytest.mark.parametrize("shared", ["none", "slots", "whole_weights", "weights"])
def test_replicas_are_equal_to_one_model(shared, monkeypatch):
    monkeypatch.setattr("tfgpipe.distribution.slices.MIN_BYTES", 0)
    verified = verify(model(dtype="float64"), strategy=strategy(shard_replicas=shared))
    assert verified.is_equal
    assert verified.num_replicas == 2
    gradients = [x for x in verified.comparisons if x.kind == "gradient"]
    assert max(x.deviation for x in gradients) <= 1e-14
    assert "sequential: D=2, K=2, M=4, one" in re.sub(r"_\d+:", ":", str(verified))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.Dropout(0.5),
        layers.BatchNormalization,
        lambda: layers.Dense(8, activity_regularizer="l2"),
        Counting,
    ],
)
def test_replicas_are_equal_to_their_microbatches(layer):
    """Each draws numbers of its own, and the statistics of the first stay."""
    verified = verify(model(layer(), layers.Dropout(0.1)), strategy=strategy())
    assert verified.is_exact
    assert not verified.is_equal
    assert "the same 4 microbatches of each of 2 replicas" in verified.verdict


def test_a_pipeline_is_verified_with_its_own_replicas():
    with strategy().scope():
        pipelined = tfgpipe.pipeline(model(), num_microbatches=2)
    verified = tfgpipe.verify(pipelined, (X, X))
    assert (verified.num_replicas, verified.num_microbatches) == (2, 2)
    assert verified.is_equal


class WrongDense(tfgpipe.layers.TPDense):
    """Is twice as large in two shards."""

    def call(self, inputs):
        return super().call(inputs) * self.num_shards


class Halves(layers.Layer):
    """Layers inside, which know their number of shards."""

    def __init__(self, num_shards, **kwargs):
        super().__init__(**kwargs)
        self.num_shards = num_shards
        self.parts = [
            tfgpipe.layers.TPDense(10, num_shards=num_shards, activation="tanh"),
            tfgpipe.layers.TPDense(8, partition="row", num_shards=num_shards),
        ]

    def call(self, x):
        return self.parts[1](self.parts[0](x))

    def get_config(self):
        return {**super().get_config(), "num_shards": self.num_shards}


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_shards_are_compared_with_whole_layers(num_replicas):
    made = model(Halves(2), tfgpipe.layers.TPDense(7, num_shards=2, partition="row"))
    replicas = tfgpipe.PipelineStrategy(
        num_stages=2, num_replicas=num_replicas, num_shards=2
    )
    verified = verify(made, strategy=replicas)
    assert (verified.num_replicas, verified.num_shards) == (num_replicas, 2)
    assert verified.is_equal
    gradients = [x for x in verified.comparisons if x.kind == "gradient"]
    assert len(gradients) == 12  # Of whole weights.


def test_shards_that_are_wrong_are_found():
    wrong = WrongDense(8, num_shards=2)
    verified = verify(model(wrong), num_stages=2, num_microbatches=2)
    assert not verified.is_exact
    assert "T=2, M=2" in str(verified)


def test_what_nothing_explains_is_to_be_reported():
    same = Comparison("loss", "loss", 0.0)
    off = Comparison("gradient", "dense/kernel", 0.5)
    verified = Verification("m", 2, 4, 1e-5, (same, off), (same, off))
    assert not verified.is_exact
    assert "DIFFERS from plain Keras" in verified.verdict
    assert "'dense/kernel', by 5.0e-01." in verified.verdict
    assert "Please report it." in verified.verdict
    rounded = dataclasses.replace(off, rounding=0.1)
    assert dataclasses.replace(verified, by_microbatch=(same, rounded)).is_exact
    wrong = dataclasses.replace(off, deviation=float("nan"))
    assert not dataclasses.replace(verified, comparisons=(same, wrong)).is_equal


def test_wrong_calls_are_refused():
    with pytest.raises(TypeError, match="which is not compiled"):
        tfgpipe.verify(keras.Sequential([keras.Input((8,))]), (X, X), **GIVEN)
    with pytest.raises(ValueError, match=r"a tuple `\(x, y\)`.*Received ndarray"):
        tfgpipe.verify(model(), X, **GIVEN)
    replicas = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2)
    with replicas.scope(), pytest.raises(ValueError, match="scope of a strategy"):
        tfgpipe.verify(model(), (X, X), **GIVEN)
    with pytest.raises(ValueError, match="Received 7 for 2 replicas"):
        tfgpipe.verify(model(), (X[:7], X[:7]), strategy=replicas, num_microbatches=2)
    with pytest.raises(ValueError, match="Verify with one replica"):
        verify(model(layers.BatchNormalization(synchronized=True)), strategy=replicas)
