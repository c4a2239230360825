"""Losses that layers add and that couple examples, as those that balance experts do."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare

layers, ops = keras.layers, keras.ops
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*couples the examples:UserWarning"),
    pytest.mark.usefixtures("double_precision"),
]

ROWS, LENGTH, WIDTH = 12, 5, 8
X = np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH))
Y = np.random.default_rng(1).normal(size=(ROWS, LENGTH, 3))


class Experts(layers.Layer):
    """A mixture of experts as in Switch Transformer, with top-2 gates."""

    config_is_complete = True

    def __init__(self, num_experts=4, always=False, **kwargs):
        super().__init__(**kwargs)
        self.num_experts, self.always = num_experts, always

    def build(self, shape):
        width, E = shape[-1], self.num_experts
        self.router = self.add_weight(shape=(width, E), name="router")
        self.experts = self.add_weight(shape=(E, width, width), name="experts")

    def call(self, x, training=False):
        tokens = ops.reshape(x, (-1, x.shape[-1]))
        shares = ops.softmax(ops.matmul(tokens, self.router))
        gates, chosen = ops.top_k(shares, 2)
        chosen = ops.one_hot(chosen, self.num_experts, dtype=x.dtype)
        gates = ops.einsum("tk,tke->te", gates, chosen)
        y = ops.einsum("td,edf,te->tf", tokens, self.experts, gates)
        if training or self.always:
            load = ops.mean(ops.sum(chosen, axis=1), axis=0)
            loss = 0.5 * ops.sum(load * ops.mean(shares, axis=0))
            self.add_loss(ops.cast(loss, keras.config.floatx()))
        return x + ops.reshape(y, ops.shape(x))

    def get_config(self):
        own = {"num_experts": self.num_experts, "always": self.always}
        return {**super().get_config(), **own}


class Adds(layers.Layer):
    """Adds losses by a function."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        for loss in self.function(x):
            self.add_loss(loss)
        return x


def model(*amid, length=None):
    """Returns Dense layers with others amid them, on sequences of any length."""
    inputs = keras.Input((length, WIDTH))
    x = layers.Dense(WIDTH, activation="tanh")(inputs)
    for layer in amid:
        x = layers.Dense(WIDTH, activation="tanh")(layer(x))
    return keras.Model(inputs, layers.Dense(3)(x))


def experts(length=None, **arguments):
    return model(*(Experts(**arguments) for _ in range(3)), length=length)


def trained(made, **compiled):
    """Returns losses of three steps and of an evaluation."""
    made.compile(keras.optimizers.SGD(0.1), **{"loss": "mse", **compiled})
    history = made.fit(X, Y, ROWS, epochs=3, shuffle=False, verbose=0).history
    return [*history["loss"], made.evaluate(X, Y, ROWS, verbose=0)]


def assert_alike(make, around=tfgpipe.pipeline, loss="mse", **arguments):
    """Asserts that a pipeline of a model trains as the model does."""
    plain, pipelined = make(), around(make(), **arguments)
    compare.copy_state(plain, pipelined)
    losses = [trained(x, loss=loss) for x in (plain, pipelined)]
    np.testing.assert_allclose(*losses, 1e-6)
    compare.assert_allclose(plain.variables, pipelined.variables, 1e-10, 1e-10)


@pytest.mark.parametrize(
    ("schedule", "K", "arguments"),
    [
        ("gpipe", 2, {}),
        ("1f1b", 4, {"remat": "layer"}),
        ("1f1b", 3, {"num_microbatches": 5, "remat": "none"}),
        ("interleaved", 4, {"jit_compile": True}),
        ("zero_bubble", 3, {"remat": "products"}),
        ("dualpipe_v", 4, {"remat": "none"}),
        ("1f1b+offload", 3, {"transfer_dtype": None}),
        ("looped_bfs", 4, {"remat": "except_last"}),
    ],
)
def test_the_balance_of_experts_is_that_of_the_mini_batch(schedule, K, arguments):
    arguments = {"num_microbatches": 4, **arguments}
    assert_alike(experts, num_stages=K, schedule=schedule, **arguments)


@pytest.mark.nightly
def test_so_it_is_of_a_known_length_and_in_a_searched_order():
    assert_alike(
        lambda: experts(LENGTH), num_stages=3, num_microbatches=4, schedule="auto"
    )


@pytest.mark.nightly
def test_so_it_is_where_xla_compiles_every_function():
    plain = experts(LENGTH)
    pipelined = tfgpipe.pipeline(experts(LENGTH), num_stages=3, num_microbatches=4)
    compare.copy_state(plain, pipelined)
    trained(plain)
    with pipelined.pipelined.traced_for("TPU"):
        trained(pipelined)
    compare.assert_allclose(plain.variables, pipelined.variables, 1e-10, 1e-10)


def test_so_it_is_in_evaluation():
    assert_alike(lambda: experts(always=True), num_stages=2, num_microbatches=4)


@pytest.mark.parametrize("remat", ["stage", "none"])
def test_a_layer_in_a_model(remat):
    def around(made, **arguments):
        inputs = keras.Input((None, WIDTH))
        return keras.Model(inputs, tfgpipe.PipelinedLayer(made, **arguments)(inputs))

    assert_alike(
        lambda: experts(always=True),
        around,
        num_stages=3,
        num_microbatches=4,
        remat=remat,
    )


def test_beside_a_loss_of_the_model_that_couples_examples():
    def dice(y, p):
        p, y = ops.sigmoid(p), ops.sigmoid(y)
        return 1 - 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p))

    with pytest.warns(UserWarning, match="Loss 'dice' couples"):
        assert_alike(
            lambda: experts(always=True),
            loss=dice,
            num_stages=2,
            num_microbatches=4,
            schedule="1f1b",
        )


def variance(x):
    return [ops.mean(ops.square(x - ops.mean(x, axis=0)))]


def across(x):
    """The batch is the last axis of what is summed."""
    x = ops.transpose(ops.sum(x, axis=1))
    return [ops.sum(ops.square(ops.mean(x, axis=-1)))]


def several(x):
    """A mean, one that couples examples, a sum, and another that does."""
    mean = ops.mean(x, axis=(0, 1))
    return [
        ops.mean(ops.square(x)),
        ops.sum(ops.square(mean)),
        ops.sum(ops.square(x), axis=(1, 2)),
        ops.logsumexp(mean) * ops.max(x),
    ]


def by_size(x):
    """As if written by hand: divided by the number of examples."""
    total = ops.sum(ops.sum(x, axis=1), axis=0) / ops.cast(ops.shape(x)[0], x.dtype)
    return [ops.sum(ops.square(total))]


@pytest.mark.parametrize("function", [variance, across, several, by_size])
def test_other_losses_that_couple_examples(function):
    assert_alike(
        lambda: model(Adds(function), layers.Dropout(0), Adds(function)),
        num_stages=3,
        num_microbatches=4,
        schedule="1f1b",
    )


def test_a_layer_that_is_used_twice():
    def make():
        layer = Experts()
        return model(layer, layer)

    assert_alike(make, num_stages=2, num_microbatches=3, schedule="1f1b")


def test_what_it_draws_is_the_same_in_both_sweeps():
    made = model(layers.Dropout(0.4, seed=1), Experts(), Experts())
    made.compile("sgd", "mse")
    verified = tfgpipe.verify(
        made, (X, Y), num_stages=3, num_microbatches=4, schedule="zero_bubble"
    )
    assert verified.is_exact
    assert [x.why for x in verified.causes] == ["draws random numbers"]


@pytest.mark.nightly
def test_they_train_in_half_precision_as_the_plain_model():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_bfloat16")
    made = experts()
    made.compile("sgd", "mse")
    data = X.astype("float32"), Y.astype("float32")
    verified = tfgpipe.verify(made, data, num_stages=2, num_microbatches=4)
    assert verified.is_equal
    plain, pipelined = (
        experts(),
        tfgpipe.pipeline(experts(), num_stages=2, num_microbatches=4),
    )
    compare.copy_state(plain, pipelined)
    losses = [trained(x) for x in (plain, pipelined)]
    np.testing.assert_allclose(*losses, 2e-2)


def test_replicas_each_balance_their_own_examples():
    """As Keras does: the loss of a layer is the mean over replicas."""
    plain = experts()
    halves = np.split(np.arange(ROWS), 2)
    with tf.GradientTape() as tape:
        total = sum(
            ops.mean(ops.square(plain(X[rows], training=True) - Y[rows]))
            + ops.sum(ops.stack(plain.losses))
            for rows in halves
        )
        total /= 2
    gradients = tape.gradient(total, plain.trainable_variables)
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2)
    with strategy.scope():
        pipelined = tfgpipe.pipeline(
            experts(), num_stages=2, num_microbatches=3, schedule="1f1b"
        )
        pipelined.compile(keras.optimizers.SGD(0.1), "mse")
    compare.copy_state(plain, pipelined)
    history = pipelined.fit(X, Y, ROWS, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"][0], total, 1e-6)
    for a, b, g in zip(
        plain.trainable_variables,
        pipelined.trainable_variables,
        gradients,
        strict=True,
    ):
        np.testing.assert_allclose(a - 0.1 * g, b.numpy(), 1e-10, 1e-10, err_msg=a.path)


class Scaled(layers.Layer):
    """Adds a loss that depends on a weight behind the means."""

    def build(self, _):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.add_loss(self.scale * ops.sum(ops.square(ops.mean(x, axis=0))))
        return x


def running(x):
    """Its values for an example depend on those before it."""
    return [ops.mean(ops.square(ops.cumsum(ops.sum(x, axis=(1, 2)), axis=0)))]


@pytest.mark.parametrize(
    "layer", [Scaled(name="odd"), Adds(running, name="odd")], ids=["weight", "order"]
)
def test_what_cannot_be_traced_back_is_said(layer):
    pipelined = tfgpipe.pipeline(model(layer), num_stages=2, num_microbatches=4)
    with pytest.warns(UserWarning, match="'odd' adds a loss .* not be traced back"):
        trained(pipelined)


def test_what_it_costs_is_said():
    pipelined = tfgpipe.pipeline(experts(), num_stages=2, num_microbatches=4)
    with pytest.warns(UserWarning, match="couples .* a third of a step more"):
        trained(pipelined)


@pytest.mark.filterwarnings("error::UserWarning")
def test_losses_of_microbatches_are_a_choice():
    """Their mean is then that of the loss, as with gradient accumulation."""
    plain, M = experts(), 4
    pipelined = tfgpipe.pipeline(
        experts(), num_stages=2, num_microbatches=M, added_losses="microbatch"
    )
    compare.copy_state(plain, pipelined)
    expected = [
        ops.mean(ops.square(plain(x, training=True) - y))
        + ops.sum(ops.stack(plain.losses))
        for x, y in zip(np.split(X, M), np.split(Y, M), strict=True)
    ]
    np.testing.assert_allclose(trained(pipelined)[0], np.mean(expected), 1e-6)


def test_a_choice_that_is_none():
    with pytest.raises(ValueError, match="`added_losses` must be one of 'mini_batch'"):
        tfgpipe.pipeline(
            experts(), num_stages=2, num_microbatches=4, added_losses="batch"
        )
