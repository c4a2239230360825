"""Layers that treat rows one by one, and those that do not."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers.layer_stacks import STACKS, ResidualBlock

ops = keras.ops


def build(*layers, num_microbatches=2, shape=(None, 4)):
    tfgpipe.PipelinedLayer(
        list(layers), num_stages=len(layers), num_microbatches=num_microbatches
    ).build(shape)


class Layer(keras.layers.Layer):
    """A layer of a function."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


MIXING = {
    "centred": lambda x: x - ops.mean(x, axis=0),
    "softmax over the batch": lambda x: ops.softmax(x, axis=0),
    "scaled by all": lambda x: x / (1.0 + ops.sum(x)),
    "through a reshape": lambda x: x - ops.mean(ops.reshape(x, (-1,))),
    "backwards": lambda x: ops.flip(x, axis=0),
    "products of rows": lambda x: ops.matmul(ops.matmul(x, ops.transpose(x)), x),
    "by their number": lambda x: x * ops.cast(ops.shape(x)[0], x.dtype),
    "in an inner function": tf.function(lambda x: x - tf.reduce_mean(x, axis=0)),
}


@pytest.mark.parametrize("name", list(MIXING))
def test_a_layer_that_mixes_rows_is_named_in_a_warning(name):
    words = (
        r"Layer 'mixer' mixes the examples.*one microbatch at a time.*outside the pipe"
    )
    with pytest.warns(UserWarning, match=words):
        build(keras.layers.Dense(4), Layer(MIXING[name], name="mixer"))


def test_an_operation_that_mixes_rows_is_named_too():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(4)(inputs)
    model = keras.Model(inputs, ops.softmax(hidden, axis=0))
    with pytest.warns(UserWarning, match="'softmax' mixes the examples"):
        tfgpipe.PipelinedLayer(model, num_stages=2, num_microbatches=2)


def test_with_one_microbatch_rows_may_mix():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(keras.layers.Dense(4), Layer(MIXING["centred"]), num_microbatches=1)


class Looks(keras.layers.Layer):
    """Looks at the whole batch for a loss and a safe exponential."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        rows = tf.cast(tf.shape(x)[0], x.dtype)
        flat = tf.reshape(x, (-1, 2))
        self.add_loss(tf.reduce_sum(x) / rows)
        total = tf.reduce_sum(flat * flat, axis=-1)
        x = x * tf.reduce_mean(self.w) + tf.reshape(total, tf.shape(x[:, :2]))[:, :1]
        largest = tf.reduce_max(x)
        return tf.math.log(tf.exp(x - largest)) + largest


def test_rows_that_stay_apart_give_no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mixes the examples")
        build(ResidualBlock(4), Looks(), keras.layers.Lambda(lambda x: x * 2.0))
        for stack in STACKS.values():
            layers = stack.make()
            tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=2).build(
                (None, *stack.shape)
            )


def test_many_layers_of_a_kind_are_traced_once():
    traced = []

    class Counted(keras.layers.Layer):
        def call(self, x):
            traced.append(x.shape[0])
            return x

    build(*(Counted() for _ in range(6)))
    assert traced.count(6) == traced.count(3) == 1


# -- what a probe runs into -----------------------------------------------------------


def trains(model, shape=(4,), num_microbatches=4, **arguments):
    """Trains a plain model and a pipeline of it; asserts that they stay the same."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, *shape)).astype("float32")
    before = model.get_weights()
    losses = []
    for pipelined in (False, True):
        model.set_weights(before)
        whole = model
        if pipelined:
            layer = tfgpipe.PipelinedLayer(
                model, num_stages=2, num_microbatches=num_microbatches, **arguments
            )
            inputs = keras.Input(shape)
            whole = keras.Model(inputs, layer(inputs))
        whole.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        whole.fit(x, np.zeros_like(whole(x)), batch_size=8, epochs=2, verbose=0)
        losses.append(whole.evaluate(x, np.zeros_like(whole(x)), verbose=0))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def around(layer, shape=(4,)):
    inputs = keras.Input(shape)
    hidden = keras.layers.Dense(4)(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(layer(hidden)))


class BrokenConfig(Layer):
    def get_config(self):
        return {"rate": self.rate_that_is_not_there}


def test_a_layer_with_a_broken_config_trains():
    """As the decoder of keras-hub's Llama and the blocks of its Swin have."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trains(around(BrokenConfig(ops.tanh)))


def test_layers_without_a_config_are_each_probed():
    layers = [Layer(function) for function in (ops.tanh, MIXING["centred"])]
    with pytest.warns(UserWarning, match=f"'{layers[1].name}' mixes the examples"):
        build(*layers)


class Picky(keras.layers.Layer):
    """Takes mini-batches and microbatches of even sizes alone."""

    def call(self, x):
        rows = x.shape[0]
        if rows is not None and rows % 2:
            raise AssertionError(f"an odd number of examples, {rows}")
        return ops.tanh(x)


UNKNOWN = r"Whether each layer treats the examples.*Received '{}'.*\({}.*compare them"


def test_a_layer_that_cannot_be_probed_is_named_in_a_warning_and_trains():
    words = UNKNOWN.format("picky", "AssertionError: .*an odd number of examples, 3")
    with pytest.warns(UserWarning, match=words) as caught:
        trains(around(Picky(name="picky")))
    assert sum("treats the examples" in str(w.message) for w in caught) == 1


def test_a_layer_that_rejects_noise_is_named_in_a_warning():
    def looked_up(x):
        return tf.gather(x, tf.cast(x, "int32") + 9, axis=1, batch_dims=1)

    with pytest.warns(UserWarning, match=UNKNOWN.format("table", "InvalidArgument")):
        build(keras.layers.Dense(4), Layer(looked_up, name="table"))


def test_a_layer_that_prints_is_not_tried_and_named_in_a_warning(capfd):
    def printed(x):
        tf.print("called on noise")
        return x

    with pytest.warns(UserWarning, match=UNKNOWN.format("print", ".*Print")):
        build(keras.layers.Dense(4), Layer(printed, name="print"))
    assert "noise" not in capfd.readouterr().err


class WrongShape(Layer):
    """Declares an output without the batch, as an embedding in keras-hub's MMDiT."""

    def compute_output_shape(self, input_shape):
        return (1, *input_shape[1:])


def test_a_layer_that_declares_a_wrong_shape_trains():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(4)(inputs)
        wrong = WrongShape(ops.tanh)(hidden)
        added = keras.layers.Add()([wrong, hidden])
        trains(keras.Model(inputs, keras.layers.Dense(2)(added)))


def test_a_layer_that_changes_the_batch_size_is_refused_with_shapes():
    words = r"must keep the batch.*Layer 'pairs' maps shape \(6, 4\) to \(3, 8\)"
    with pytest.raises(ValueError, match=words):
        build(
            keras.layers.Dense(4),
            Layer(lambda x: ops.reshape(x, (-1, 8)), name="pairs"),
        )


# -- outputs with the batch size as another axis --------------------------------------


def compared():
    """Returns a model of all examples with all, as CLIP ends in."""
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(4)(inputs)
    head = Layer(lambda x: ops.matmul(x, ops.transpose(x)), name="head")
    return keras.Model(inputs, head(hidden) * 2.0)


def test_an_output_of_a_wrong_shape_is_refused():
    words = r"together along the first axis. Layer 'head'.*shapes \(6, 6\).*outside"
    with pytest.raises(ValueError, match=words):
        tfgpipe.PipelinedLayer(compared(), num_stages=2, num_microbatches=2)


def test_with_one_microbatch_an_output_may_be_as_wide_as_the_batch():
    layer = tfgpipe.PipelinedLayer(compared(), num_stages=2, num_microbatches=1)
    assert layer(np.ones((8, 4), "float32")).shape == (8, 8)


# -- losses that layers add -----------------------------------------------------------


class AddsLoss(keras.layers.Layer):
    """Adds a loss in training."""

    def __init__(self, function, draws=False, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.dropout = keras.layers.Dropout(0.5, seed=1) if draws else None

    def call(self, x, training=False):
        if training:
            hidden = self.dropout(x, training=True) if self.dropout else x
            self.add_loss(self.function(hidden))
        return x


def product_of_means(x):
    """As the losses that balance the load of experts."""
    probabilities = ops.softmax(x)
    chosen = ops.one_hot(ops.argmax(x, axis=-1), x.shape[-1])
    return ops.sum(ops.mean(probabilities, axis=0) * ops.mean(chosen, axis=0))


def warnings_of_a_step(layer, *, owned, num_microbatches=2):
    model = around(layer)
    arguments = {"num_stages": 2, "num_microbatches": num_microbatches}
    if owned:
        whole = tfgpipe.PipelinedModel(model, **arguments)
    else:
        whole = keras.Sequential([tfgpipe.PipelinedLayer(model, **arguments)])
    whole.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=4, verbose=0)
    return [str(w.message) for w in caught if "adds" in str(w.message)]


@pytest.mark.parametrize(
    ("loss", "owned"), [(product_of_means, True), (ops.sum, False)]
)
def test_an_added_loss_that_is_no_mean_is_named_in_a_warning(loss, owned):
    (message,) = warnings_of_a_step(AddsLoss(loss, name="experts"), owned=owned)
    assert "Layer 'experts' adds a loss that is no mean" in message
    assert "num_microbatches=2" in message


def test_a_regularizer_of_activities_is_a_mean_over_the_batch():
    """Keras divides it by the batch size."""
    layer = keras.layers.Dense(4, activity_regularizer="l2", name="decayed")
    assert not warnings_of_a_step(layer, owned=False)


def test_a_regularizer_of_activities_of_ones_own():
    def largest(x):
        return ops.max(x) * ops.cast(ops.shape(x)[0], x.dtype)

    layer = keras.layers.Dense(4, activity_regularizer=largest, name="sparse")
    (message,) = warnings_of_a_step(layer, owned=False)
    assert "Layer 'sparse' adds a loss that is no mean" in message


@pytest.mark.parametrize(
    ("loss", "owned"), [(ops.mean, True), (lambda x: 0.5 + ops.mean(x**2), False)]
)
def test_an_added_loss_that_is_a_mean_gives_no_warning(loss, owned):
    assert not warnings_of_a_step(AddsLoss(loss), owned=owned)


def test_with_one_microbatch_an_added_loss_may_be_anything():
    assert not warnings_of_a_step(AddsLoss(ops.sum), owned=False, num_microbatches=1)


def test_an_added_loss_of_random_numbers_is_not_known():
    layer = AddsLoss(ops.mean, draws=True, name="noisy")
    (message,) = warnings_of_a_step(layer, owned=False)
    assert "Whether each loss that a layer adds is a mean" in message
    assert "'noisy' (NotImplementedError: a loss of random numbers)" in message
