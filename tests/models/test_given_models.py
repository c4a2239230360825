"""Models as users give them: what their classes, graphs and `compile` say counts."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.zoo import floats

layers, ops = keras.layers, keras.ops

X, Y = floats(8, 4), floats(8, 1, seed=2)
PIPELINE = {"num_stages": 2, "num_microbatches": 4}


def functional(kind=keras.Model):
    inputs = keras.Input((4,))
    return kind(inputs, layers.Dense(1)(layers.Dense(4, activation="tanh")(inputs)))


def assert_trains_as_plain(make, x=X, y=Y, compiled=None, **arguments):
    """Compares losses and weights after a step, and losses of an evaluation."""
    results = []
    plain, pipelined = compare.model_pair(make, **{**PIPELINE, **arguments})
    for model in (plain, pipelined):
        model.compile(keras.optimizers.SGD(0.1), **(compiled or {"loss": "mse"}))
        losses = [model.train_on_batch(x, y), model.test_on_batch(x, y)]
        results.append([*losses, *(v.numpy() for v in model.variables)])
    compare.assert_allclose(*results[::-1], rtol=1e-5, atol=1e-6)


# -- methods of the class -------------------------------------------------------------

METHODS = (
    "train_step",
    "test_step",
    "predict_step",
    "compute_loss",
    "compute_metrics",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
)


def own(method, base=keras.Model):
    return type("Own", (base,), {method: lambda self, *_, **__: None})


@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_the_models_class_is_refused_by_name(method):
    words = rf"`{method}` of Own .*keras.Model\(model.input, model.output\).*Pipelined"
    with pytest.raises(TypeError, match=words):
        tfgpipe.pipeline(functional(own(method)), **PIPELINE)


def test_methods_of_a_sequential_models_class_and_of_the_object_are_refused():
    sequential = own("train_step", keras.Sequential)([layers.Dense(4), layers.Dense(1)])
    with pytest.raises(TypeError, match="`train_step` of Own"):
        tfgpipe.PipelinedModel(sequential, **PIPELINE)
    patched = functional()
    patched.compute_loss = lambda *_, **__: 0.0
    with pytest.raises(TypeError, match="`compute_loss` of Functional"):
        tfgpipe.pipeline(patched, **PIPELINE)


class TenTimes(keras.Model):
    def compute_loss(self, *args, **kwargs):
        return 10.0 * super().compute_loss(*args, **kwargs)


def test_the_way_out_for_a_method_of_training_is_the_plain_model():
    results = []
    for pipelined in (False, True):
        keras.utils.set_random_seed(1)
        model = functional(TenTimes)
        if pipelined:
            layer = tfgpipe.PipelinedLayer(model, **PIPELINE)
            model = TenTimes(model.input, layer(model.input))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        results.append([model.train_on_batch(X, Y), *model.get_weights()])
    compare.assert_allclose(*results[::-1], rtol=1e-5, atol=1e-6)


def test_a_class_that_changes_nothing_trains():
    class Named(keras.Model):
        """With a constructor and methods of its own."""

        def describe(self):
            return self.name

    assert_trains_as_plain(lambda: functional(Named))


# -- no loss --------------------------------------------------------------------------


@pytest.mark.parametrize("metrics", [None, ["mae"]])
def test_without_a_loss_a_step_is_refused_as_by_keras(metrics):
    model = functional()
    model.compile("sgd", metrics=metrics)
    pipelined = tfgpipe.pipeline(functional(), **PIPELINE)
    pipelined.compile("sgd", metrics=metrics)
    for each in (model, pipelined):
        for step in (each.train_on_batch, each.test_on_batch):
            with pytest.raises(ValueError, match="No loss to compute"):
                step(X, Y)


class AddsLossInTraining(layers.Layer):
    def call(self, x, training=False):
        if training:
            self.add_loss(ops.sum(x**2))
        return x


def test_a_loss_in_training_alone_is_none_in_evaluation():
    inputs = keras.Input((4,))
    outputs = layers.Dense(2)(AddsLossInTraining()(layers.Dense(4)(inputs)))
    model = tfgpipe.pipeline(keras.Model(inputs, outputs), **PIPELINE)
    model.compile("sgd")
    assert model.train_on_batch(X, Y) > 0
    with pytest.raises(ValueError, match="No loss to compute"):
        model.test_on_batch(X, Y)


class AddsLoss(layers.Layer):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(self.reduce(x**2))
        return x


@pytest.mark.parametrize("reduce", [ops.mean, ops.sum, None])
def test_added_losses_or_regularizers_alone_are_a_loss(reduce):
    def make():
        inputs = keras.Input((4,))
        x = layers.Dense(4, kernel_regularizer=None if reduce else "l2")(inputs)
        x = AddsLoss(reduce)(x) if reduce else x
        return keras.Model(inputs, layers.Dense(1)(x))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist for variables")
        assert_trains_as_plain(make, compiled={"loss": None})


def test_nothing_to_train_is_said_as_by_keras():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, ops.sum(inputs * 2.0, axis=1, keepdims=True))
    for each in (model, tfgpipe.pipeline(model, **PIPELINE)):
        each.compile("sgd", "mse")
        with pytest.warns(UserWarning, match="does not have any trainable weights"):
            each.train_on_batch(X, Y)


# -- weights of the class itself ------------------------------------------------------


class Scaled(keras.Model):
    """Has a weight of its own, beside those of its layers."""

    def __init__(self, trainable=True):
        super().__init__()
        self.hidden, self.last = layers.Dense(4), layers.Dense(1)
        self.scale = self.add_weight(shape=(4,), name="scale", trainable=trainable)

    def call(self, x):
        return self.last(self.hidden(x) * self.scale)


def recorded(net):
    inputs = keras.Input((4,))
    return keras.Model(inputs, net.call(inputs))


def test_a_weight_that_no_layer_owns_is_refused_by_name():
    with pytest.raises(ValueError, match=r"scale.*no layer.*into a layer"):
        tfgpipe.pipeline(recorded(Scaled()), **PIPELINE)


def test_the_value_of_a_weight_in_a_graph_is_refused():
    hidden = layers.Dense(4)
    inputs = keras.Input((4,))
    x = ops.matmul(hidden(inputs), hidden.kernel.value)
    with pytest.raises(ValueError, match=r"'dense.*kernel'. Leave out `.value`"):
        tfgpipe.PipelinedLayer(keras.Model(inputs, x), **PIPELINE)


def test_a_weight_that_no_layer_owns_may_be_frozen():
    nets = []

    def make():
        keras.utils.set_random_seed(1)
        nets.append(Scaled(trainable=False))
        return recorded(nets[-1])

    assert_trains_as_plain(make)


def test_a_weight_that_only_a_function_reads_is_named_in_a_warning():
    nets = [Scaled(), Scaled()]

    def make(net):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        x = layers.Dense(4)(inputs)
        x = layers.Lambda(lambda x: x * net.scale.value)(x)
        return keras.Model(inputs, layers.Dense(1)(x))

    models = [make(nets[0]), tfgpipe.pipeline(make(nets[1]), **PIPELINE)]
    nets[1].scale.assign(nets[0].scale)
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse")
    expected = models[0].train_on_batch(X, Y)
    with pytest.warns(UserWarning, match=r"scale.*no layer.*not trained"):
        received = models[1].train_on_batch(X, Y)
    np.testing.assert_allclose(received, expected, rtol=1e-6)
    compare.assert_allclose(models[1].weights, models[0].weights, rtol=1e-5, atol=1e-6)


def test_a_weight_of_the_model_around_a_pipelined_layer_is_trained():
    class Around(keras.Model):
        def __init__(self, pipelined):
            super().__init__()
            self.scale = self.add_weight(shape=(4,), name="scale")
            inputs = keras.Input((4,))
            x = layers.Dense(1)(layers.Dense(4)(inputs) * self.scale)
            inner = keras.Model(inputs, x)
            self.inner = (
                tfgpipe.PipelinedLayer(inner, **PIPELINE) if pipelined else inner
            )

        def call(self, x):
            return self.inner(x)

    plain, pipelined = Around(False), Around(True)
    for model in (plain, pipelined):
        model(X)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    compare.copy_state(plain, pipelined)
    for model in (plain, pipelined):
        model.train_on_batch(X, Y)
    np.testing.assert_allclose(pipelined.scale, plain.scale, rtol=1e-5, atol=1e-6)


def test_layers_that_ran_when_the_model_was_made_are_spoken_of():
    table = layers.Dense(4)(np.ones((3, 4), "float32"))
    inputs = keras.Input((), dtype="int32")
    model = keras.Model(inputs, ops.take(table, inputs, axis=0))
    words = r"model of 1 calls.*No call is of a layer.*ran when the model was made"
    with pytest.raises(ValueError, match=words) as raised:
        tfgpipe.pipeline(model, **PIPELINE)
    assert "or fewer" not in str(raised.value)


# -- graphs ---------------------------------------------------------------------------


def test_an_inner_model_with_a_constant_for_an_input():
    def make():
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        inner = keras.Model({"a": a, "b": b}, layers.Dense(4)(a + layers.Dense(4)(b)))
        inputs = keras.Input((4,))
        given = {"a": ops.ones((1, 4)), "b": layers.Dense(4)(inputs)}
        return keras.Model(inputs, layers.Dense(1)(inner(given)))

    assert_trains_as_plain(make)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_with_one_microbatch_an_operation_may_join_the_batch(num_stages):
    def make():
        inputs = keras.Input((4,))
        total = ops.tensordot(layers.Dense(4)(inputs), layers.Dense(4)(inputs), 2)
        return keras.Model(inputs, layers.Dense(1)(inputs) + ops.sigmoid(total))

    assert_trains_as_plain(make, num_stages=num_stages, num_microbatches=1)


@pytest.mark.parametrize("keepdims", [False, True])
def test_with_one_microbatch_outputs_that_join_the_batch_are_refused(keepdims):
    inputs = keras.Input((4,))
    hidden = layers.Dense(4)(inputs)
    mean = ops.mean(hidden, axis=0, keepdims=keepdims)
    model = keras.Model(inputs, layers.Rescaling(2.0)(mean))
    with pytest.raises(ValueError, match=r"Layer 'mean.*' maps shape \(6, 4\) to"):
        tfgpipe.pipeline(model, num_stages=2, num_microbatches=1)


def test_an_operation_that_joins_the_batch_is_refused_with_the_ways_out():
    inputs = keras.Input((4,))
    total = ops.tensordot(layers.Dense(4)(inputs), inputs, 2)
    words = (
        r"Layer 'tensordot.*' maps shape \(6, 4\) to \(\). Write it so "
        r"that the first axis stays.*num_microbatches=1"
    )
    with pytest.raises(ValueError, match=words):
        tfgpipe.pipeline(keras.Model(inputs, inputs + total), **PIPELINE)


# -- no rows --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "num_microbatches"), [("gpipe", 1), ("1f1b", 4), ("zero_bubble", 2)]
)
def test_a_batch_without_rows_is_the_plain_models(schedule, num_microbatches):
    plain, pipelined = compare.model_pair(
        functional,
        num_stages=2,
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
    for model in (plain, pipelined):
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    results = [
        [model.train_on_batch(X[:n], Y[:n]) for n in (0, 8, 0)]
        + [model.test_on_batch(X[:0], Y[:0])]
        for model in (plain, pipelined)
    ]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    compare.assert_allclose(pipelined.weights, plain.weights, rtol=1e-5, atol=1e-6)


def test_a_call_without_rows_has_a_gradient_of_zero():
    layer = tfgpipe.PipelinedLayer(functional(), **PIPELINE)
    with tf.GradientTape() as tape:
        y = layer(X[:0], training=True)
        loss = tf.reduce_sum(y)
    assert y.shape == (0, 1)
    for gradient in tape.gradient(loss, layer.trainable_weights):
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))
