"""Models with a `call` of their own, whose calls are recorded on a sample."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare

layers, ops = keras.layers, keras.ops
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS = 12
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, 8)), RNG.normal(size=(ROWS, 3))


class Gate(layers.Layer):
    """A layer of operations of TensorFlow, which stays whole."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        return x * tf.nn.sigmoid(x * self.scale)


class Residual(keras.Model):
    """A loop, a branch on a setting, an operation, and a mode passed on."""

    def __init__(self, depth=4, gated=True, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [
            layers.Dense(8, activation="tanh", name=f"block_{i}") for i in range(depth)
        ]
        self.gates = [Gate() for _ in range(depth)] if gated else []
        self.dropout = layers.Dropout(rate, seed=1)
        self.norm, self.head = layers.LayerNormalization(), layers.Dense(3)

    def call(self, x, training=None):
        for i, block in enumerate(self.blocks):
            hidden = self.dropout(block(x), training=training)
            if self.gates:
                hidden = self.gates[i](hidden)
            x = x + hidden if i % 2 == 0 else ops.maximum(x, hidden)
        return self.head(self.norm(x))


class Tagger(keras.Model):
    """Tokens with a mask and features in, two outputs by name."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(9, 6, mask_zero=True)
        self.encoder = layers.LSTM(6, return_sequences=True)
        self.tags, self.score = layers.Dense(4), layers.Dense(1)

    def call(self, inputs):
        x = self.encoder(self.embedding(inputs["tokens"]))
        pooled = ops.mean(x, axis=1) + inputs["features"]
        return {"tags": self.tags(x), "score": self.score(pooled)}


def trained(model, x, y, loss):
    model.compile(keras.optimizers.SGD(0.1), loss)
    history = model.fit(x, y, ROWS, epochs=3, shuffle=False, verbose=0).history
    return [*history["loss"], model.evaluate(x, y, ROWS, verbose=0, return_dict=True)]


def assert_alike(make, x, y, loss, **arguments):
    """Asserts that a pipeline trains as the model that it is recorded from."""
    plain, source = make(), make()
    for each in (plain, source):
        each(x)
    source.set_weights(plain.get_weights())
    pipelined = tfgpipe.pipeline(source, sample=x, **arguments)
    ours, theirs = (trained(each, x, y, loss) for each in (pipelined, plain))
    np.testing.assert_allclose(ours[:-1], theirs[:-1], 1e-6)
    for name in theirs[-1]:
        np.testing.assert_allclose(ours[-1][name], theirs[-1][name], 1e-6)
    weights = (model.trainable_variables for model in (plain, source))
    compare.assert_allclose(*weights, 1e-10, 1e-10)
    expected, found = (
        keras.tree.flatten(m.predict(x, verbose=0)) for m in (plain, source)
    )
    compare.assert_allclose(expected, found, 1e-10, 1e-10)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_stages": 3, "num_microbatches": 4, "schedule": "1f1b"},
        {"num_stages": 4, "num_microbatches": 5, "schedule": "zero_bubble"},
        {"partition": ["block_1", "block_3"], "num_microbatches": 2},
    ],
    ids=["1f1b", "zero bubble", "by names"],
)
def test_all_is_as_in_the_model(floatx, arguments):
    floatx("float64")
    keras.utils.clear_session(free_memory=False)
    assert_alike(Residual, X, Y, "mse", **arguments)


def test_inputs_and_outputs_by_name_and_masks(floatx):
    floatx("float64")
    tokens = RNG.integers(0, 9, (ROWS, 5))
    tokens[:, 0] = 1
    x = {"tokens": tokens, "features": RNG.normal(size=(ROWS, 6))}
    y = {"tags": RNG.normal(size=(ROWS, 5, 4)), "score": RNG.normal(size=(ROWS, 1))}
    loss = {"tags": "mse", "score": "mae"}
    assert_alike(Tagger, x, y, loss, num_stages=3, num_microbatches=4)


def test_calls_of_the_model_are_those_of_the_pipeline():
    pipelined = tfgpipe.pipeline(
        Residual(depth=2), sample=X, num_stages=2, num_microbatches=2
    )
    kinds = [
        type(call.layer).__name__
        for stage in pipelined.stages
        for call in stage.segment.calls
    ]
    block = ["Dense", "Dropout", "Gate"]
    head = ["LayerNormalization", "Dense"]
    assert kinds == [*block, "Add", *block, "Maximum", *head]


class Encoder(layers.Layer):
    """Does all the work of a model, in blocks that are layers of layers as well."""

    def __init__(self, depth, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Block() for _ in range(depth)]

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x, training=training)
        return x


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.outer = layers.Dense(12, activation="tanh"), layers.Dense(8)
        self.dropout = layers.Dropout(0.0, seed=2)

    def call(self, x, training=False):
        return x + self.dropout(self.outer(self.inner(x)), training=training)


class Encoding(keras.Model):
    def __init__(self, depth=3):
        super().__init__()
        self.encoder, self.head = Encoder(depth), layers.Dense(3)

    def call(self, x, training=False):
        return self.head(self.encoder(x, training=training))


def test_a_layer_that_does_all_the_work_is_opened(floatx):
    floatx("float64")
    arguments = {"num_stages": 4, "num_microbatches": 4, "schedule": "1f1b"}
    assert_alike(Encoding, X, Y, "mse", **arguments)


@pytest.mark.parametrize(
    ("num_calls", "kinds"),
    [
        (2, ["Encoder", "Dense"]),
        (3, ["Block", "Block", "Block", "Dense"]),
        (5, [*["Dense", "Dense", "Dropout", "Add"] * 3, "Dense"]),
        (99, [*["Dense", "Dense", "Dropout", "Add"] * 3, "Dense"]),
    ],
)
def test_layers_are_opened_as_far_as_is_needed(num_calls, kinds):
    model = tfgpipe.functional(Encoding(), X, num_calls=num_calls)
    pipelined = tfgpipe.PipelinedLayer(model, num_stages=1, num_microbatches=1)
    calls = pipelined.stages[0].segment.calls
    assert [type(call.layer).__name__ for call in calls] == kinds
    again = tfgpipe.functional(model, num_calls=num_calls)
    np.testing.assert_array_equal(again(X), model(X))


class Whole(Block):
    """May be opened, but for what is said."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind
        if kind == "weights":
            self.scale = self.add_weight(shape=(8,), initializer="ones")

    def call(self, x, training=False):
        if self.kind == "tensors":
            x = tf.nn.relu(x)
        if self.kind == "modes" and training:
            x = self.dropout(x)
        if self.kind == "losses":
            self.add_loss(ops.mean(x))
        return super().call(x, training=training)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("weights", "has variables of its own"),
        ("tensors", r"recorded at test_recorded_models.py, line \d+, `x = tf.nn.relu"),
        ("modes", "Dropout in training where it applies Dense in inference"),
        ("losses", r"line \d+, `self.add_loss\(ops.mean\(x\)\)`"),
        ("regularizer", "regularizes its activity"),
    ],
)
@pytest.mark.filterwarnings("default::UserWarning")
def test_layers_that_do_more_stay_whole(kind, reason):
    extra = {"activity_regularizer": "l2"} if kind == "regularizer" else {}
    x = keras.Input((8,))
    layer = Whole(kind, name="more", **extra)
    model = keras.Model(x, layers.Dense(2)(layer(x)))
    with pytest.warns(UserWarning, match=f"'more' stays whole, .*{reason}"):
        assert tfgpipe.functional(model, num_calls=4) is model


def test_a_recorded_model_in_half_precision_gives_the_same():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = Residual()
        x = X.astype("float32")
        expected = model(x)
        found = tfgpipe.functional(model, x)(x)
    finally:
        keras.config.set_dtype_policy("float32")
    assert found.dtype == expected.dtype == "bfloat16"
    np.testing.assert_array_equal(found, expected)


def test_draws_of_the_mode():
    model = tfgpipe.functional(Residual(rate=0.5), X)
    still, drawn = (model(X, training=mode) for mode in (False, True))
    np.testing.assert_array_equal(still, model(X, training=False))
    assert np.abs(still - drawn).max() > 1e-3


def test_a_functional_model_is_returned_as_it_is():
    x = keras.Input((4,))
    model = keras.Model(x, layers.Dense(2)(x))
    assert tfgpipe.functional(model, np.ones((2, 4))) is model


class Headed(keras.Model):
    """A base of models that are refused."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = layers.LayerNormalization(), layers.Dense(3)


class OfTensors(Headed):
    def call(self, x):
        return tf.nn.relu(self.head(x))


class ByValue(Headed):
    def call(self, x):
        if ops.mean(x) > 0:
            x = -x
        return self.head(x)


class InTraining(Headed):
    def call(self, x, training=None):
        if training:
            x = self.norm(x)
        return self.head(x)


class OwnWeight(Headed):
    def build(self, shape):
        self.scale = self.add_weight(shape=(8,), initializer="ones")

    def call(self, x):
        return self.head(self.norm(x * self.scale))


class OfConstant(Headed):
    def call(self, x):
        return self.head(x + self.norm(ops.ones((1, 8))))


class OwnStep(Residual):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (OfTensors, TypeError, r"line \d+, `return tf.nn.relu\(self.head\(x\)\)`"),
        (ByValue, TypeError, r"test_recorded_models.py, line \d+, `if ops.mean"),
        (InTraining, ValueError, "LayerNormalization in training where .* Dense"),
        (OwnWeight, ValueError, "which no layer of it owns"),
        (OfConstant, ValueError, r"whose .*layer_normalization.*gamma.* it does not"),
        (OwnStep, TypeError, "Received `train_step` of OwnStep"),
    ],
)
def test_what_cannot_be_recorded_is_named(kind, error, words):
    with pytest.raises(error, match=words):
        tfgpipe.pipeline(kind(), sample=X, num_stages=2, num_microbatches=2)


def test_a_pipeline_of_it_is_saved(tmp_path):
    pipelined = tfgpipe.pipeline(
        Residual(gated=False), sample=X, num_stages=2, num_microbatches=2
    )
    expected = pipelined.predict(X, verbose=0)
    loaded = compare.reloaded(pipelined, tmp_path)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), expected)
