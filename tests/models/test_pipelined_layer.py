"""`PipelinedLayer` as a Keras layer: where it works, what it keeps, what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src import testing

import tfgpipe
from tests.helpers import compare
from tests.helpers.layer_stacks import REMAT_MODES, dense, normalised, regularised
from tests.helpers.marks import nightly
from tfgpipe._compat import keras_internals
from tfgpipe.capture import dtype_policies
from tfgpipe.runtime import step

X = np.random.default_rng(0).standard_normal((12, 5), dtype=np.float32)
Y = np.random.default_rng(1).standard_normal((12, 3), dtype=np.float32)


def sequential(layers):
    return keras.Sequential([keras.Input((5,)), *layers])


def functional(layers):
    x = inputs = keras.Input((5,))
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, x)


class Subclassed(keras.Model):
    def __init__(self, layers):
        super().__init__()
        self.stack = tuple(layers)

    def call(self, x, training=None):
        for layer in self.stack:
            x = layer(x, training=training)
        return x


KINDS = {"sequential": sequential, "functional": functional, "subclassed": Subclassed}


def both(make_layers=dense, kind=sequential, **arguments):
    """Returns the plain and the pipelined model, with equal weights."""
    arguments = {"num_stages": 2, "num_microbatches": 4, **arguments}
    plain = kind(make_layers())
    pipelined = kind([tfgpipe.PipelinedLayer(make_layers(), **arguments)])
    for model in (plain, pipelined):
        model(X)
    compare.copy_state(plain, pipelined)
    return plain, pipelined


def assert_same_variables(plain, pipelined, rtol=1e-5, atol=1e-5):
    compare.assert_allclose(plain.variables, pipelined.variables, rtol, atol)


@pytest.mark.parametrize(
    ("kind", "run_eagerly"),
    nightly(
        itertools.product(KINDS, [False, True]),
        gate=[("sequential", True), ("functional", False), ("subclassed", False)],
    ),
)
def test_fit_evaluate_and_predict_are_the_plain_models(kind, run_eagerly):
    plain, pipelined = both(kind=KINDS[kind])
    histories = []
    for model in (plain, pipelined):
        # Plain SGD: Adam would blow a rounding difference up where gradients vanish.
        eagerly = run_eagerly or model is plain
        model.compile("sgd", "mse", metrics=["mae"], run_eagerly=eagerly)
        # 12 rows in batches of 8: the last batch is partial.
        weights = np.arange(12, dtype=np.float32)
        fitted = model.fit(
            X,
            Y,
            batch_size=8,
            epochs=2,
            shuffle=False,
            sample_weight=weights,
            verbose=0,
        )
        histories.append(fitted.history)
    for key, values in histories[0].items():
        np.testing.assert_allclose(values, histories[1][key], rtol=1e-5)
    assert_same_variables(plain, pipelined)
    np.testing.assert_allclose(
        plain.evaluate(X, Y, batch_size=5, verbose=0),
        pipelined.evaluate(X, Y, batch_size=5, verbose=0),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        plain.predict(X, batch_size=5, verbose=0),
        pipelined.predict(X, batch_size=5, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_dataset_without_drop_remainder():
    plain, pipelined = both()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(7)
    for model in (plain, pipelined):
        model.compile("sgd", "mse", run_eagerly=model is plain)
        model.fit(data, epochs=2, verbose=0)
    assert_same_variables(plain, pipelined)


def test_train_on_batch():
    plain, pipelined = both()
    for model in (plain, pipelined):
        model.compile("sgd", "mse", run_eagerly=model is plain)
    for rows in (12, 3, 1):
        losses = [m.train_on_batch(X[:rows], Y[:rows]) for m in (plain, pipelined)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    assert_same_variables(plain, pipelined)


@pytest.mark.parametrize("graph", [True, False])
def test_a_custom_loop(graph):
    plain, pipelined = both()

    def train(model, *, graph):
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        step = tf.function(step) if graph else step
        for _ in range(3):
            step(tf.constant(X), tf.constant(Y))

    train(plain, graph=False)
    train(pipelined, graph=graph)
    assert_same_variables(plain, pipelined)


def test_regularisers_and_added_losses_count_once_in_fit():
    plain, pipelined = both(regularised)
    losses = []
    for model in (plain, pipelined):
        model.compile("sgd", "mse", run_eagerly=model is plain)
        losses.append(model.fit(X, Y, batch_size=12, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert_same_variables(plain, pipelined)


def test_freezing_a_layer_after_a_first_step_is_noticed():
    plain, pipelined = both()
    for model in (plain, pipelined):
        layers = model.layers if model is plain else model.layers[0].layers
        for trainable in (True, False):
            layers[1].trainable = trainable
            model.compile("sgd", "mse", run_eagerly=model is plain)
            model.fit(X, Y, batch_size=12, verbose=0)
    assert_same_variables(plain, pipelined)


def test_layers_that_already_have_weights_keep_them_and_move():
    layers = dense()
    plain = sequential(layers)
    before = [w.numpy() for w in plain.weights]
    expected = plain(X).numpy()
    layer = tfgpipe.PipelinedLayer(plain, num_stages=2, num_microbatches=3)
    np.testing.assert_allclose(layer(X).numpy(), expected, rtol=1e-5, atol=1e-6)
    compare.assert_equal(before, layer.weights)
    assert layer.layers[-1].kernel.value.device.endswith("CPU:1")


def test_two_pipelines_and_layers_around_them():
    def make(pipelined):
        keras.utils.set_random_seed(1)
        wrap = (
            (
                lambda ls, k: [
                    tfgpipe.PipelinedLayer(ls, num_stages=k, num_microbatches=3)
                ]
            )
            if pipelined
            else (lambda ls, k: ls)
        )
        first = [keras.layers.Dense(6), keras.layers.Dense(6)]
        second = [keras.layers.Dense(4) for _ in range(3)]
        between = keras.layers.Dense(5, activation="tanh")
        return sequential([*wrap(first, 2), between, *wrap(second, 3)])

    plain, pipelined = make(False), make(True)
    compare.copy_state(plain, pipelined)
    compare.assert_runs_the_same(plain, pipelined, X)


# -- saving ---------------------------------------------------------------------------


def test_config_round_trip_keeps_every_argument():
    layer = tfgpipe.PipelinedLayer(
        dense(),
        partition=[1, 3],
        num_microbatches=3,
        remat="layer",
        jit_compile=False,
        devices=["CPU:1", "CPU:3"],
        name="pipe",
    )
    config = layer.get_config()
    again = tfgpipe.PipelinedLayer.from_config(config)
    assert again.get_config() == config


def test_keras_file_round_trip(tmp_path):
    _, model = both(normalised)
    model.compile("adam", "mse")
    model.fit(X, np.zeros((12, 4), "float32"), batch_size=12, verbose=0)
    loaded = compare.reloaded(model, tmp_path)
    np.testing.assert_array_equal(loaded(X).numpy(), model(X).numpy())
    compare.assert_equal(model.optimizer.variables, loaded.optimizer.variables)


@pytest.mark.parametrize("num_stages", [1, 2, *nightly([4])])
def test_weights_saved_at_four_stages_load_at_any_number(tmp_path, num_stages):
    _, four = both(normalised, num_stages=4)
    _, other = both(normalised, num_stages=num_stages, balance="params")
    path = tmp_path / "model.weights.h5"
    four.save_weights(path)
    for variable in other.weights:
        variable.assign(variable + 1.0)
    other.load_weights(path)
    np.testing.assert_allclose(other(X).numpy(), four(X).numpy(), rtol=1e-6, atol=1e-6)
    assert _paths(four) == _paths(other)


def _paths(model):
    """Variable paths, less the numbers by which Keras tells equal names apart."""
    return [re.sub(r"_\d+(?=/)", "", v.path) for v in model.variables]


def test_weights_go_to_the_plain_sequential_and_back(tmp_path):
    plain, pipelined = both(normalised)
    (layer,) = pipelined.layers
    for variable in plain.weights:
        variable.assign(variable + 1.0)
    plain.save_weights(tmp_path / "plain.weights.h5")
    layer.unpipelined().load_weights(tmp_path / "plain.weights.h5")
    np.testing.assert_allclose(pipelined(X).numpy(), plain(X).numpy(), 1e-6, 1e-6)

    for variable in layer.weights:
        variable.assign(variable * 0.5)
    layer.unpipelined().save_weights(tmp_path / "pipelined.weights.h5")
    plain.load_weights(tmp_path / "pipelined.weights.h5")
    np.testing.assert_allclose(pipelined(X).numpy(), plain(X).numpy(), 1e-6, 1e-6)


@pytest.mark.parametrize("num_stages", [1, 2, *nightly([4])])
def test_tensorflow_checkpoints_do_not_depend_on_the_cut(tmp_path, num_stages):
    _, four = both(normalised, num_stages=4)
    _, other = both(normalised, num_stages=num_stages)
    for variable in four.weights:
        variable.assign(variable + 1.0)
    path = tf.train.Checkpoint(model=four).save(str(tmp_path / "ckpt"))
    status = tf.train.Checkpoint(model=other).restore(path)
    status.assert_existing_objects_matched()
    compare.assert_equal(four.weights, other.weights)


class TestKerasConformance(testing.TestCase):
    """Keras' own conformance test for layers."""

    def test_dense_stack(self):
        self.run_layer_test(
            tfgpipe.PipelinedLayer,
            init_kwargs={
                "layers": [keras.layers.Dense(4), keras.layers.Dense(3)],
                "num_stages": 2,
                "num_microbatches": 2,
            },
            input_shape=(6, 5),
            expected_output_shape=(6, 3),
            expected_num_trainable_weights=4,
            expected_num_non_trainable_weights=0,
            expected_num_seed_generators=0,
            expected_num_losses=0,
            supports_masking=True,
        )

    def test_stack_with_state_and_losses(self):
        self.run_layer_test(
            tfgpipe.PipelinedLayer,
            init_kwargs={
                "layers": [
                    keras.layers.Dense(4, activity_regularizer="l2"),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dropout(0.3),
                ],
                "num_stages": 2,
                "num_microbatches": 2,
            },
            input_shape=(6, 5),
            expected_output_shape=(6, 4),
            expected_num_trainable_weights=4,
            expected_num_non_trainable_weights=2,
            expected_num_non_trainable_variables=3,
            expected_num_seed_generators=1,
            expected_num_losses=1,
            supports_masking=True,
        )


# -- strategy -------------------------------------------------------------------------


def test_a_model_under_a_strategy_trains_as_the_plain_model():
    plain, _ = both(normalised)
    with tfgpipe.PipelineStrategy(num_stages=3).scope():
        layer = tfgpipe.PipelinedLayer(normalised(), num_microbatches=1)
        pipelined = sequential([layer])
        compare.copy_state(plain, pipelined)
        pipelined.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
    assert layer.num_stages == 3
    y = np.zeros((12, 4), "float32")
    for model in (plain, pipelined):
        model.fit(X, y, batch_size=6, epochs=3, shuffle=False, verbose=0)
    assert_same_variables(plain, pipelined)


def test_two_replicas_train_as_the_plain_model():
    plain, _ = both(dense)
    with tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2).scope():
        pipelined = sequential([tfgpipe.PipelinedLayer(dense(), num_microbatches=3)])
        compare.copy_state(plain, pipelined)
        pipelined.compile("sgd", "mse")
    plain.compile("sgd", "mse", run_eagerly=True)
    for model in (plain, pipelined):
        model.fit(X, Y, batch_size=6, epochs=3, shuffle=False, verbose=0)
    assert_same_variables(plain, pipelined)


def test_a_strategy_entered_after_the_layer_was_built_is_refused():
    _, model = both()
    strategy = tfgpipe.PipelineStrategy(num_stages=2)
    words = r"no strategy.*PipelineStrategy"
    with strategy.scope(), pytest.raises(RuntimeError, match=words):
        model(X)


def test_a_strategy_left_after_the_layer_was_built_is_refused():
    with tfgpipe.PipelineStrategy(num_stages=2).scope():
        model = sequential([tfgpipe.PipelinedLayer(dense(), num_microbatches=2)])
    with pytest.raises(RuntimeError, match=r"Call it inside `with strategy.scope\(\)"):
        model(X)


def test_a_model_saved_under_a_strategy_loads_under_another(tmp_path):
    with tfgpipe.PipelineStrategy(num_stages=4).scope():
        four = sequential([tfgpipe.PipelinedLayer(dense(), num_microbatches=2)])
        four.save(tmp_path / "four.keras")
        expected = four(X)
    with tfgpipe.PipelineStrategy(num_stages=2).scope():
        two = keras.models.load_model(tmp_path / "four.keras")
        np.testing.assert_allclose(two(X), expected, rtol=1e-6, atol=1e-6)
    assert two.layers[0].num_stages == 2


def test_a_foreign_strategy_is_refused():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    words = "Received MirroredStrategy"
    with strategy.scope(), pytest.raises(ValueError, match=words):
        tfgpipe.PipelinedLayer(dense(), num_stages=2, num_microbatches=2)


def test_stages_and_devices_are_the_strategys_under_one():
    strategy = tfgpipe.PipelineStrategy(num_stages=2)
    words = r"num_stages=3.*strategy of 2 stages"
    with strategy.scope(), pytest.raises(ValueError, match=words):
        tfgpipe.PipelinedLayer(dense(), num_stages=3, num_microbatches=2)


# -- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        tfgpipe.PipelinedLayer,
        tfgpipe.PipelinedModel,
        lambda stack, **named: tfgpipe.pipeline(
            keras.Sequential([keras.Input((4,)), *stack]), **named
        ),
        tfgpipe.plan,
    ],
    ids=["layer", "model", "pipeline", "plan"],
)
@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"chunks": 4}, r"Received chunks=4\. Use `num_microbatches`\."),
        ({"n_microbatches": 4}, r"n_microbatches=4\. Use `num_microbatches`\."),
        ({"num_micro_batches": 4}, r"Use `num_microbatches`\."),
        ({"micro_batch_size": 4}, "Use `num_microbatches`: the batch size divided by"),
        ({"num_partitions": 2}, r"Received num_partitions=2\. Use `num_stages`\."),
        ({"stages": 2, "num_microbatches": 4}, r"Use `num_stages`\."),
        ({"checkpoint": "never"}, r"checkpoint='never'\. Use `remat`"),
    ],
)
def test_names_of_other_libraries_are_answered_with_the_name_here(make, named, words):
    with pytest.raises(TypeError, match=words):
        make([keras.layers.Dense(4), keras.layers.Dense(4)], **named)


def test_a_schedule_needs_the_model_that_owns_its_loss():
    stack = [keras.layers.Dense(4), keras.layers.Dense(4)]
    with pytest.raises(TypeError, match=r"schedule='1f1b'. Use `tfgpipe.PipelinedM"):
        tfgpipe.PipelinedLayer(stack, num_microbatches=4, schedule="1f1b")
    with pytest.raises(ValueError, match=r"Unrecognized keyword arguments.*colour"):
        tfgpipe.PipelinedLayer(stack, num_microbatches=4, colour="red")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_stages": 5}, "num_stages=5 for a model of 4 calls"),
        ({"num_stages": 0}, r"`num_stages` must be .* at least 1\. Received 0"),
        ({"num_stages": "2"}, "`num_stages` must be an integer .* Received '2'"),
        ({"num_stages": 2.0}, "`num_stages` must be an integer .* Received 2.0"),
        ({"num_stages": True}, "`num_stages` must be an integer .* Received True"),
        ({"num_stages": 10**9}, "`num_stages` must be .* at most 1,048,576"),
        ({"num_microbatches": 0}, "at least 1. Received 0"),
        ({"num_microbatches": 2.0}, "must be an integer"),
        ({"num_microbatches": 10**12}, "`num_microbatches` .* at most 1,048,576"),
        ({"num_microbatches": 2**20}, "num_stages=2 and num_microbatches=1048576"),
        ({"memory_limit": "1G"}, "`memory_limit` must be a number of bytes"),
        ({"memory_limit": float("nan")}, "`memory_limit` .* Received nan"),
        ({"memory_limit": -1}, "`memory_limit` must be a number .* Received -1"),
        ({"balance": 3}, "`balance` must be one of .* Received 3"),
        ({"balance": None}, "`balance` must be one of .* Received None"),
        ({"partition": [1, 2], "num_stages": None}, "adds up to 3, for 4 calls"),
        ({"partition": [4, 0], "num_stages": None}, r"\[4, 0\]. Drop the empty"),
        ({"partition": [True, 3], "num_stages": None}, r"\[True, 3\]. Drop the"),
        (
            {"partition": [2, 2], "num_stages": 3},
            "=3 and partition=.*makes 2",
        ),
        ({"balance": "even"}, "'flops', 'time', 'memory'. Received 'even'"),
        ({"remat": "always"}, "'products', 'auto', 'none'. Received"),
        ({"jit_compile": "yes"}, "`jit_compile` must be one of 'auto', True, False"),
        ({"devices": ["CPU:0", "CPU:99"]}, "Received CPU:99; TensorFlow sees"),
        ({"devices": ["CPU:0"]}, "2 stages x 1 replicas need 2 devices"),
        ({"devices": ["CPU:0", "CPU:1", "CPU:2"]}, "Received 3: .* Leave some out"),
        ({"devices": "CPU:0,CPU:1"}, "`devices` must be a list of device names"),
        ({"devices": [0, 1]}, r"`devices` must be a list .* Received \[0, 1\]"),
        ({"devices": [None, None]}, "`devices` must be a list of device names"),
        ({"dtype": "int32"}, "Received dtype='int32'. Leave it out"),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_received(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        tfgpipe.PipelinedLayer(
            dense(), **{"num_stages": 2, "num_microbatches": 2, **arguments}
        )


def test_integers_of_numpy_are_integers():
    two = np.int64(2)
    layer = tfgpipe.PipelinedLayer(dense(), num_stages=two, num_microbatches=two)
    assert layer.get_config()["num_microbatches"] == 2
    layer = tfgpipe.PipelinedLayer(dense(), partition=[two, two], num_microbatches=2)
    assert json.dumps(layer.get_config()["partition"]) == "[2, 2]"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tfgpipe.pipeline([], num_microbatches=2), "`model` must be a Model"),
        (lambda: tfgpipe.pipeline(None, num_microbatches=2), "Received None"),
        (lambda: tfgpipe.stage_table(None), "`model` must be a Layer. Received None"),
        (lambda: tfgpipe.recut(None, [1]), "`model` must be a Layer. Received None"),
        (lambda: tfgpipe.plot_schedule("x"), "`schedule` must be a Schedule"),
        (lambda: tfgpipe.make_logical_cpus("8"), "`num_devices` must be an integer"),
        (
            lambda: tfgpipe.make_logical_cpus(10**9),
            "at most 4,096. Received 1000000000",
        ),
        (lambda: tfgpipe.PipelineStrategy(num_stages=0), "`num_stages` must be"),
        (lambda: tfgpipe.PipelineStrategy(num_stages="2"), "`num_stages` must be"),
        (
            lambda: tfgpipe.PipelineStrategy(num_stages=2, num_replicas=0),
            "`num_replicas` must be an integer of at least 1. Received 0",
        ),
        (
            lambda: tfgpipe.quantization.apply(dense(), scheme="8bit"),
            "`scheme` must be a Scheme. Received '8bit'",
        ),
        (lambda: tfgpipe.quantization.apply(dense(), delay="3"), "`delay` must be"),
        (lambda: tfgpipe.quantization.apply(dense(), delay=1.5), "`delay` must be"),
        (
            lambda: tfgpipe.quantization.apply(dense(), delay=10, freeze_after=5),
            "delay=10, freeze_after=5",
        ),
        (
            lambda: tfgpipe.quantization.MovingAverageRange(ramp="x"),
            "`ramp` must be one of True, False. Received 'x'",
        ),
        (lambda: planned(batch_size="32"), "`batch_size` must be an integer"),
        (lambda: planned(batch_size=0), "`batch_size` must be .* Received 0"),
        (lambda: planned(batch_size=-5), "`batch_size` must be .* Received -5"),
        (lambda: planned(num_slots=-1), "`num_slots` must be .* Received -1"),
        (lambda: planned(num_slots=1.5), "`num_slots` must be .* Received 1.5"),
        *(
            (
                lambda wrong=wrong: tfgpipe.PipelinedModel(
                    dense(), num_stages=2, num_microbatches=2, schedule=wrong
                ),
                "`schedule` must be the name of a schedule, one of 'gpipe'",
            )
            for wrong in (None, lambda K, M: tfgpipe.schedules.gpipe(K, M))
        ),
    ],
)
def test_public_functions_name_the_argument_that_is_wrong(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def planned(**arguments):
    model = keras.Sequential([keras.Input((5,)), *dense()])
    return tfgpipe.plan(model, num_stages=2, num_microbatches=2, **arguments)


def test_a_new_partition_must_be_a_list():
    layer = tfgpipe.PipelinedLayer(dense(), num_stages=2, num_microbatches=2)
    layer(np.ones((2, 5), "float32"))
    with pytest.raises(ValueError, match=r"`partition` must be a list .* None"):
        tfgpipe.recut(keras.Sequential([layer]), None)


class CannotBeBuilt(keras.layers.Layer):
    """A layer whose weight cannot be created, as for lack of memory."""

    def build(self, input_shape):
        self.add_weight(shape=(2,), initializer=self.fail)

    def fail(self, shape, dtype=None):
        raise MemoryError("no memory")

    def call(self, x):
        return x


def test_a_pipeline_that_cannot_be_built_leaves_nothing_behind():
    x = np.ones((4, 8), "float32")
    arguments = {"num_stages": 2, "num_microbatches": 2}

    def fit(*layers, wrap=tfgpipe.PipelinedModel):
        model = wrap(list(layers), **arguments)
        model.compile("sgd", "mse")
        model.fit(x, x, verbose=0)

    def sequential(layers, **arguments):
        pipelined = tfgpipe.PipelinedLayer(layers, **arguments)
        return keras.Sequential([pipelined, keras.layers.Dense(8)])

    for wrap in (tfgpipe.PipelinedModel, sequential):
        with pytest.raises(MemoryError, match="no memory"):
            fit(keras.layers.Dense(8), CannotBeBuilt(), wrap=wrap)
        fit(keras.layers.Dense(8), keras.layers.Dense(8), wrap=wrap)


def test_more_stages_than_devices_shows_the_line_that_makes_some():
    layers = [keras.layers.Dense(2) for _ in range(9)]
    with pytest.raises(ValueError, match=r"tfgpipe.make_logical_cpus\(9\)"):
        tfgpipe.PipelinedLayer(layers, num_stages=9, num_microbatches=2)


@pytest.mark.parametrize("layers", [[], None, keras.layers.Dense])
def test_no_layers_are_refused(layers):
    with pytest.raises(ValueError, match="non-empty list of Keras layers"):
        tfgpipe.PipelinedLayer(layers, num_stages=1, num_microbatches=2)


def test_a_function_is_refused_with_the_way_to_wrap_it():
    with pytest.raises(TypeError, match=r"position 1.*keras.layers.Lambda"):
        tfgpipe.PipelinedLayer(
            [keras.layers.Dense(5), tf.nn.relu], num_stages=1, num_microbatches=2
        )


@pytest.mark.parametrize("shape", [(12, 5), (None, 5)])
def test_a_layer_that_changes_the_batch_is_refused(shape):
    class Doubles(keras.layers.Layer):
        def call(self, x):
            return keras.ops.concatenate([x, x], axis=0)

    layer = tfgpipe.PipelinedLayer(
        [keras.layers.Dense(5), Doubles(name="doubles")],
        num_stages=2,
        num_microbatches=2,
    )
    with pytest.raises(ValueError, match=r"batch dimension.*Layer 'doubles' maps"):
        layer.build(shape)


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: keras.Sequential([f])])
def test_a_function_that_changes_the_batch_is_found_among_others(wrap):
    doubles = wrap(keras.layers.Lambda(lambda x: tf.concat([x, x], 0)))
    layer = tfgpipe.PipelinedLayer(
        [keras.layers.Lambda(lambda x: 2.0 * x), doubles],
        num_stages=2,
        num_microbatches=2,
    )
    with pytest.raises(ValueError, match=f"Layer '{doubles.name}' maps shape"):
        layer.build((None, 3))


def test_a_layer_that_reduces_the_batch_away_is_refused():
    class Reduces(keras.layers.Layer):
        def call(self, x):
            return keras.ops.mean(x, axis=0)

    layer = tfgpipe.PipelinedLayer(
        [keras.layers.Dense(5), Reduces(name="reduces")],
        num_stages=2,
        num_microbatches=2,
    )
    with pytest.raises(ValueError, match="Layer 'reduces' maps shape"):
        layer.build((None, 5))


@pytest.mark.parametrize("kind", [keras.layers.LSTM, keras.layers.GRU])
def test_a_stateful_recurrent_layer_is_refused(kind):
    stack = [kind(3, stateful=True, name="memory"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input(batch_shape=(4, 5, 2)), *stack])
    words = "stateful=True` continues where.*Received 'memory'. Use `stateful=False`"
    with pytest.raises(ValueError, match=words):
        tfgpipe.PipelinedLayer(model, num_stages=2, num_microbatches=2)


class Counts(keras.layers.Layer):
    """Counts its calls in training."""

    def build(self, shape):
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="count"
        )

    def call(self, x, training=False):
        if training:
            self.count.assign(self.count + 1.0)
        return x


def test_a_layer_that_changes_a_variable_once_a_microbatch_is_named_once():
    stack = [keras.layers.Dropout(0.5), Counts(name="counts"), keras.layers.Dense(2)]
    layer = tfgpipe.PipelinedLayer(stack, num_stages=3, num_microbatches=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(X, training=False)
    words = "once a microbatch, in order.*Received '.*counts/count'. Use `num_micro"
    with pytest.warns(UserWarning, match=words):
        layer(X, training=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(X, training=True)
    assert stack[1].count.numpy() == 6


def test_a_pipeline_in_a_pipeline_is_refused():
    inner = tfgpipe.PipelinedLayer(
        dense(), num_stages=2, num_microbatches=2, name="inner"
    )
    with pytest.raises(ValueError, match=r"cannot hold another.*'inner'"):
        tfgpipe.PipelinedLayer([inner], num_stages=1, num_microbatches=2)


def test_stages_before_build_say_how_to_build():
    layer = tfgpipe.PipelinedLayer(dense(), num_stages=2, num_microbatches=2)
    with pytest.raises(RuntimeError, match="known only when it is built"):
        _ = layer.stages


def test_nan_is_never_hidden():
    plain, pipelined = both(
        lambda: [keras.layers.Dense(6, activation="tanh") for _ in range(3)]
    )
    x = X.copy()
    x[7, 2] = np.nan
    expected, received = compare.run(plain, x, graph=False), compare.run(pipelined, x)
    assert np.isnan(received.outputs[7]).all()
    assert not np.isnan(np.delete(received.outputs, 7, axis=0)).any()
    for name, gradient in zip(
        expected.weight_grads, received.weight_grads.values(), strict=True
    ):
        np.testing.assert_array_equal(
            np.isnan(gradient), np.isnan(expected.weight_grads[name])
        )
        assert np.isnan(gradient).any()


@pytest.mark.parametrize("graph", [True, False])
def test_an_error_inside_a_layer_reaches_the_caller(graph):
    class Explodes(keras.layers.Layer):
        def call(self, x):
            return tf.debugging.check_numerics(x / 0.0, "boom")

    layer = tfgpipe.PipelinedLayer(
        [keras.layers.Dense(5), Explodes()], num_stages=2, num_microbatches=8
    )
    # When one device fails, TensorFlow cancels a graph's others, and now and then it is
    # their cancellation that it reports.
    errors = [tf.errors.InvalidArgumentError]
    errors += [tf.errors.CancelledError] if graph else []
    with pytest.raises(tuple(errors), match=r"boom|cancelled"):
        (tf.function(layer) if graph else layer)(X)


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_assertions_and_prints_in_a_layer_run_once_a_microbatch(remat):
    class Looks(keras.layers.Layer):
        def call(self, x):
            tf.debugging.assert_less(x, 10.0, "too large")
            tf.print("seen", tf.shape(x)[0], output_stream=f"file://{path}")
            return x * 2.0

    with tempfile.NamedTemporaryFile(mode="r") as file:
        path = file.name
        layer = tfgpipe.PipelinedLayer(
            [keras.layers.Dense(5), Looks()],
            num_stages=2,
            num_microbatches=3,
            remat=remat,
        )
        layer.build((None, 5))

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(x, training=True))
            return tape.gradient(loss, layer.trainable_variables)

        step(X)
        assert file.read().splitlines() == ["seen 4"] * 3
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            layer(1000.0 * X)


def test_jit_compile_around_the_layer_falls_back_says_so_and_trains_right():
    plain, pipelined = both()
    plain.compile("sgd", "mse", jit_compile=False)
    with pytest.warns(UserWarning, match="jit_compile"):
        pipelined.compile("sgd", "mse", jit_compile=True)
    for model in (plain, pipelined):
        model.fit(X, Y, batch_size=12, verbose=0)
    assert_same_variables(plain, pipelined)


def test_the_number_of_stages_defaults_to_the_devices():
    layers = [keras.layers.Dense(2) for _ in range(8)]
    assert tfgpipe.PipelinedLayer(layers, num_microbatches=2).num_stages == 8
    two = tfgpipe.PipelinedLayer(
        dense(), num_microbatches=2, devices=["CPU:3", "CPU:1"]
    )
    assert two.num_stages == 2
    two.build((None, 5))
    assert two.layers[0].kernel.value.device.endswith("CPU:3")


def test_balance_by_parameters_evens_the_stages():
    layers = [keras.layers.Dense(units) for units in (100, 1, 1, 1, 1, 100)]
    layer = tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=2)
    layer.build((None, 10))
    # 1100, 101, 2, 2, 2, 200 parameters.
    assert [len(stage.layers) for stage in layer.stages] == [1, 5]


def test_a_mixed_policy_computes_and_stores_as_the_plain_model():
    with dtype_policies.default_policy_scope("mixed_bfloat16"):
        plain, pipelined = both(num_microbatches=1)
        assert pipelined(X).dtype == plain(X).dtype == tf.bfloat16
        assert {w.dtype for w in pipelined.weights} == {"float32"}
        # Eight bits of mantissa, rounded at other places in a graph than op by op.
        np.testing.assert_allclose(
            plain(X).numpy().astype("float32"),
            pipelined(X).numpy().astype("float32"),
            atol=2**-7,
        )


class NeedsMask(keras.layers.Layer):
    def call(self, x, mask=None):
        if mask is None:
            raise ValueError("There is no mask.")
        return x


def test_a_layer_behind_that_needs_a_mask_gets_it_when_the_model_is_made():
    stack = [keras.layers.Embedding(5, 3, mask_zero=True), keras.layers.Dense(3)]
    layer = tfgpipe.PipelinedLayer(stack, num_stages=2, num_microbatches=2)
    inputs = keras.Input((4,), dtype="int32")
    model = keras.Model(inputs, NeedsMask()(layer(inputs)))
    assert model(np.array([[1, 0, 0, 0]] * 2)).shape == (2, 4, 3)


@pytest.mark.parametrize("in_graph", [True, False, "inlined"])
def test_gradients_of_gradients_by_the_input_of_frozen_layers(in_graph, monkeypatch):
    if in_graph == "inlined":
        monkeypatch.setattr(step, "FEW_OPERATIONS", 2**12)

    def dense():
        return keras.layers.Dense(4, activation="tanh", trainable=False)

    layer = tfgpipe.PipelinedLayer([dense(), dense()], num_stages=2, num_microbatches=2)
    x = tf.constant(np.random.default_rng(0).standard_normal((4, 4)), tf.float32)
    layer(x)

    def penalized(model):
        def gradient(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(model(x, training=True) ** 2)
                penalty = tf.reduce_sum(inner.gradient(y, x) ** 2) + y
            return outer.gradient(penalty, x)

        return tf.function(gradient) if in_graph else gradient

    expected = penalized(layer.unpipelined())(x)
    np.testing.assert_allclose(penalized(layer)(x), expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_gradients_of_weights_are_refused():
    layer = tfgpipe.PipelinedLayer(
        [keras.layers.Dense(4, activation="tanh")], num_stages=1, num_microbatches=2
    )
    x = tf.ones((4, 4))
    layer(x)

    @tf.function(autograph=False)
    def second(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(layer(x, training=True) ** 2)
            penalty = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(penalty, [v.value for v in layer.trainable_variables])

    with pytest.raises(LookupError, match=r"adds up .* in place.*`unpipelined\(\)`"):
        second(x)


class SumsUnmasked(keras.layers.Layer):
    """Sums two inputs where the masks of both say so."""

    def call(self, inputs, mask=None):
        mask = mask or [None, None]
        masks = [1.0 if m is None else keras.ops.cast(m, "float32") for m in mask]
        return sum(x * m for x, m in zip(inputs, masks, strict=True))


def test_a_mask_that_is_given_leaves_the_callers_tensors_as_they_are():
    layer = tfgpipe.PipelinedLayer(
        [SumsUnmasked(), keras.layers.Activation("linear")],
        num_stages=2,
        num_microbatches=2,
    )
    a, b = tf.ones((2, 3)), 10 * tf.ones((2, 3))
    own, given = tf.constant([[[True, False, True]] * 2, [[True, True, False]] * 2])
    keras_internals.calls.set_mask(a, own)
    y = layer([a, b], mask=[None, given])
    np.testing.assert_array_equal(y, [[11, 10, 1]] * 2)
    assert keras_internals.calls.get_mask(a) is own
    assert keras_internals.calls.get_mask(b) is None
    y = layer([a, b], mask=[given, given])  # In place of its own.
    np.testing.assert_array_equal(y, [[11, 11, 0]] * 2)
    assert keras_internals.calls.get_mask(a) is own


def test_devices_of_shards_that_nothing_uses_are_told():
    with tfgpipe.PipelineStrategy(num_stages=2, num_shards=2).scope():
        layer = tfgpipe.PipelinedLayer(dense(), num_microbatches=2)
        with pytest.warns(UserWarning, match=r"No layer is in shards\. Received 2"):
            layer.build((None, 5))
