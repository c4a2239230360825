"""`PipelinedModel` as a Keras model: its results are those of the plain model."""

from __future__ import annotations

import itertools
import sys
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, zoo
from tests.helpers.fitted_pairs import (
    FIT,
    NUM_ROWS,
    PIPELINE,
    WEIGHTS,
    X,
    Y,
    assert_fits_the_same,
    assert_same_numbers,
    assert_same_variables,
    assert_trains_the_same,
    both,
    sgd,
    small,
    two_outputs,
)
from tests.helpers.marks import nightly
from tests.helpers.some_schedules import LAST_FIRST, order
from tests.helpers.zoo import floats, ids
from tfgpipe import schedules
from tfgpipe._compat import keras_internals
from tfgpipe.schedules.schedule import Schedule

layers = keras.layers


def classifier() -> keras.Model:
    inputs = keras.Input((5,))
    x = layers.Dense(6, activation="tanh")(inputs)
    return keras.Model(inputs, layers.Dense(3)(x))


# -- fit, evaluate and predict --------------------------------------------------------

OPTIMIZERS = {
    "momentum": lambda: sgd(momentum=0.9, nesterov=True),
    "clipnorm": lambda: sgd(clipnorm=0.1),
    "global_clipnorm": lambda: sgd(global_clipnorm=0.1),
    "clipvalue": lambda: sgd(clipvalue=0.05),
    "weight decay": lambda: sgd(weight_decay=0.1),
    "accumulated gradients": lambda: sgd(gradient_accumulation_steps=2),
    "moving averages": lambda: sgd(
        use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4
    ),
    "scaled loss": lambda: sgd(loss_scale_factor=64.0),
    "decaying rate": lambda: sgd(
        learning_rate=keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=0.1),
}


# Several of them in one, where they have nothing to do with each other.
TOGETHER = {
    "momentum, clipnorm, weight decay, averages": lambda: sgd(
        momentum=0.9,
        nesterov=True,
        clipnorm=0.1,
        weight_decay=0.1,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=4,
    ),
    "global_clipnorm, accumulated gradients": lambda: sgd(
        global_clipnorm=0.1, gradient_accumulation_steps=2
    ),
    "adam, clipvalue, scaled loss, decaying rate": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5),
        epsilon=0.1,
        clipvalue=0.05,
        loss_scale_factor=64.0,
    ),
}


@pytest.mark.parametrize(
    "make",
    nightly(OPTIMIZERS.values(), gate=TOGETHER.values()),
    ids=[*TOGETHER, *OPTIMIZERS],
)
def test_any_optimizer_makes_the_plain_models_updates(make):
    """Its slots included."""
    models = both(small, lambda: {"optimizer": make(), "loss": "mse"})
    assert_fits_the_same(models, X, Y)


SETTINGS = {
    "metrics": {"metrics": ["mae", keras.losses.cosine_similarity]},
    "weighted metrics": {"metrics": ["mae"], "weighted_metrics": ["mae", "mse"]},
    "eager": {"metrics": ["mae"], "run_eagerly": True},
    "steps per execution": {"metrics": ["mae"], "steps_per_execution": 2},
    "a weight for the loss": {"loss_weights": [0.3]},
    "several": {
        "metrics": ["mae", keras.losses.cosine_similarity],
        "weighted_metrics": ["mae", "mse"],
        "loss_weights": [0.3],
        "steps_per_execution": 2,
    },
}


@pytest.mark.parametrize(
    ("name", "schedule"),
    nightly(
        zip(SETTINGS, itertools.cycle(schedules.NAMES[:4]), strict=False),
        gate=[("eager", "1f1b"), ("several", "zero_bubble")],
    ),
)
def test_any_arguments_of_compile_train_as_the_plain_model(name, schedule):
    models = both(
        small,
        lambda: {"optimizer": sgd(), "loss": "mse", **SETTINGS[name]},
        schedule=schedule,
    )
    assert_trains_the_same(models, X, Y, WEIGHTS)


def test_validation_data_and_callbacks(tmp_path):
    models = both(
        small, lambda: {"optimizer": sgd(), "loss": "mse", "metrics": ["mae"]}
    )
    results = []
    for model in models:
        best = tmp_path / f"{len(results)}.weights.h5"
        history = model.fit(
            X,
            Y,
            **{**FIT, "epochs": 6},
            validation_data=(X[:7], -Y[:7], WEIGHTS[:7]),
            callbacks=[
                # The targets point the other way, so it soon gets worse.
                keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True),
                keras.callbacks.ModelCheckpoint(
                    best, save_best_only=True, save_weights_only=True
                ),
            ],
        ).history
        assert 1 < len(history["loss"]) < 6
        results.append((history, [v.numpy() for v in model.variables]))
        model.load_weights(best)
        results[-1] += ([v.numpy() for v in model.variables],)
    assert_same_numbers(*results)


def test_compiling_anew():
    models = both(
        small, lambda: {"optimizer": sgd(), "loss": "mse", "metrics": ["mae"]}
    )
    assert_fits_the_same(models, X, Y)
    for model in models:
        model.compile(sgd(), "mae", metrics=["mse"], loss_weights=[2.0])
    assert_fits_the_same(models, X, Y)


def test_single_batches():
    plain, pipelined = both(
        small, lambda: {"optimizer": sgd(), "loss": "mse", "metrics": ["mae"]}
    )
    for rows in (10, 2, 1):
        x, y, w = X[:rows], Y[:rows], WEIGHTS[-rows:]
        for run in ("train_on_batch", "test_on_batch"):
            scores = [
                getattr(model, run)(x, y, w, return_dict=True)
                for model in (plain, pipelined)
            ]
            assert_same_numbers(*scores)
        predicted = [m.predict_on_batch(x) for m in (plain, pipelined)]
        assert_same_numbers(*predicted)
    assert_same_variables(plain, pipelined)


def test_a_dataset_with_weights():
    data = tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(4)
    models = both(small, lambda: {"optimizer": sgd(), "loss": "mse"})
    results = [
        (m.fit(data, epochs=2, verbose=0).history, m.evaluate(data, verbose=0))
        for m in models
    ]
    assert_same_numbers(*results)
    assert_same_variables(*models)


def test_weights_of_classes():
    models = both(
        classifier,
        lambda: {
            "optimizer": sgd(),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "weighted_metrics": ["accuracy"],
        },
    )
    labels = ids(NUM_ROWS) % 3
    weights = {"class_weight": {0: 1.0, 1: 3.0, 2: 0.0}}
    assert_fits_the_same(models, X, labels, **weights)


def test_a_list_of_layers_is_built_by_fit():
    def stack():
        return [layers.Dense(6, activation="tanh"), layers.Dense(3)]

    plain = keras.Sequential([keras.Input((5,)), *stack()])
    compare.fresh_names()
    pipelined = tfgpipe.PipelinedModel(stack(), **PIPELINE)
    pipelined.compile(sgd(learning_rate=0.0), "mse")
    assert not pipelined.built
    pipelined.fit(X, Y, **FIT)
    compare.copy_state(pipelined, plain)
    for model in (plain, pipelined):
        model.compile(sgd(), "mse")
    assert_fits_the_same((plain, pipelined), X, Y)


# -- several outputs ------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [3, *nightly([2])])
def test_losses_and_metrics_by_the_names_of_outputs(num_stages):
    """The outputs come from different stages."""
    models = both(
        zoo.two_in_two_out,
        lambda: {
            "optimizer": sgd(),
            "loss": {"price": "mse", "kind": "sparse_categorical_crossentropy"},
            "loss_weights": {"price": 0.3, "kind": 2.0},
            "metrics": {"price": ["mae"], "kind": ["accuracy"]},
        },
        num_stages=num_stages,
    )
    assert_trains_the_same(models, *two_outputs())


@pytest.mark.parametrize("weights", ["one each", *nightly(["one for all"])])
def test_losses_in_a_list_and_sample_weights(weights):
    models = both(
        zoo.two_in_two_out,
        lambda: {
            "optimizer": sgd(),
            "loss": ["mse", "sparse_categorical_crossentropy"],
            "weighted_metrics": [["mae"], ["accuracy"]],
        },
    )
    x, y = two_outputs()
    given = WEIGHTS if weights == "one for all" else [WEIGHTS, WEIGHTS[::-1]]
    assert_fits_the_same(models, x, [*y.values()], given)


def test_losses_of_batches_of_unequal_rows_are_weighed():
    """Eagerly, as where the number of rows is known."""
    models = both(
        zoo.two_in_two_out,
        lambda: {
            "optimizer": sgd(),
            "loss": {"price": "mse", "kind": "sparse_categorical_crossentropy"},
            "run_eagerly": True,
        },
    )
    assert_fits_the_same(models, *two_outputs(), epochs=1)


def test_outputs_in_a_dict():
    models = both(
        zoo.dicts,
        lambda: {
            "optimizer": sgd(),
            "loss": {"z": "mse", "early": "mae"},
            "loss_weights": {"z": 0.2, "early": 3.0},
            "metrics": {"z": ["mse"]},
        },
        num_stages=3,
    )
    y = {"early": floats(NUM_ROWS, 5), "z": floats(NUM_ROWS, 2)}
    assert_fits_the_same(models, zoo.ZOO["dicts"].data(NUM_ROWS), y, WEIGHTS)


def test_an_output_without_a_loss():
    models = both(
        zoo.two_in_two_out,
        lambda: {"optimizer": sgd(), "loss": {"price": "mse", "kind": None}},
    )
    x, y = two_outputs()
    assert_fits_the_same(models, x, {**y, "kind": None})


# -- mixed precision ------------------------------------------------------------------


@pytest.mark.usefixtures("mixed_precision")
def test_a_step_that_overflows_in_one_microbatch_is_left_out():
    def compiled():
        optimizer = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=1024.0)
        return {"optimizer": optimizer, "loss": "mse"}

    def make():
        inputs = keras.Input((5,))
        x = layers.Dense(6, kernel_regularizer=keras.regularizers.L2(0.5))(inputs)
        return keras.Model(inputs, layers.Dense(3)(x))

    models = both(make, compiled)
    too_much = np.where(np.arange(NUM_ROWS)[:, None] == 4, 1e6, X)
    for model in models:
        for x in (X, too_much, X):
            model.train_on_batch(x, Y)
    for a, b in zip(*(model.variables for model in models), strict=True):
        # Half precision has a thousandth.
        compare.close(a.numpy(), b.numpy(), a.path, 1e-2, 2e-3)
    for model in models:
        assert model.optimizer.dynamic_scale == 512.0
        assert model.optimizer.inner_optimizer.iterations == 2


@pytest.mark.usefixtures("mixed_precision")
def test_compile_wraps_the_optimizer_as_keras_does():
    for model in both(small, lambda: {"optimizer": "adam", "loss": "mse"}):
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


# -- what is refused ------------------------------------------------------------------


def make_model(num_calls=4, **arguments):
    stack = [layers.Dense(3) for _ in range(num_calls)]
    return tfgpipe.PipelinedModel(stack, **arguments)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_too_few_microbatches_for_a_schedule(schedule):
    words = (
        rf"'{schedule}' needs at least as many microbatches .* num_microbatches=2 for "
        r'3 devices. Use num_microbatches=3 or more, or schedule="gpipe"'
    )
    with pytest.raises(ValueError, match=words):
        make_model(num_stages=3, num_microbatches=2, schedule=schedule)


def test_too_few_microbatches_for_interleaved_stages():
    words = r"'interleaved' needs .* num_microbatches=1 for 2 devices"
    with pytest.raises(ValueError, match=words):
        make_model(num_stages=4, num_microbatches=1, schedule="interleaved")


def test_interleaved_stages_are_to_be_counted():
    words = r"several stages on each device. Received no `num_stages`. Pass a multiple"
    with pytest.raises(ValueError, match=words):
        make_model(num_microbatches=4, schedule="interleaved")


def test_stages_that_cannot_be_dealt():
    words = r"as many to each. Received 3 stages for 2 devices"
    with pytest.raises(ValueError, match=words):
        make_model(
            num_stages=3,
            num_microbatches=4,
            schedule="interleaved",
            devices=["CPU:0", "CPU:1"],
        )


def test_stages_on_devices_in_another_order_than_the_schedules():
    words = (
        r"'interleaved' has its stages on devices \(0, 1, 0, 1\), by index. Received "
        r"devices that have them on \(0, 0, 1, 1\). Give the stages' `devices`"
    )
    strategy = tfgpipe.PipelineStrategy(
        num_stages=4, devices=["CPU:0", "CPU:0", "CPU:1", "CPU:1"]
    )
    with strategy.scope(), pytest.raises(ValueError, match=words):
        make_model(num_stages=4, num_microbatches=4, schedule="interleaved")


def test_gpipe_runs_on_whatever_devices_stages_have():
    model = make_model(
        num_stages=4,
        num_microbatches=4,
        devices=["CPU:0", "CPU:0", "CPU:1", "CPU:1"],
    )
    assert model.schedule.placement == (0, 0, 1, 1)


def test_what_does_not_fit_is_refused_before_weights_move():
    plain = keras.Sequential([keras.Input((4,)), *map(keras.layers.Dense, (4, 4, 4))])
    before = [v.value.device for v in plain.variables]
    with pytest.raises(ValueError, match="at least as many microbatches"):
        tfgpipe.pipeline(plain, num_stages=3, num_microbatches=2, schedule="1f1b")
    assert [v.value.device for v in plain.variables] == before


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_one_stage_a_device_where_a_schedule_wants_it(schedule):
    words = rf"'{schedule}' has one stage a device. Received 4 stages for 2 .*interleav"
    with pytest.raises(ValueError, match=words):
        make_model(
            num_stages=4,
            num_microbatches=4,
            schedule=schedule,
            devices=["CPU:0", "CPU:1", "CPU:0", "CPU:1"],
        )


def test_a_schedule_that_has_no_such_name():
    words = r"must be one of 'gpipe', '1f1b', .* of your own. Received 'pipedream'"
    with pytest.raises(ValueError, match=words):
        make_model(num_stages=2, num_microbatches=2, schedule="pipedream")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_stages": 3}, "Received one of 2 stages, and num_stages=3"),
        (
            {"num_microbatches": 4},
            "'last first' is for 2 microbatches. Received num_microbatches=4",
        ),
        ({"devices": ["CPU:0"]}, "The schedule is for 2 devices. Received 1."),
    ],
)
def test_a_schedule_for_others(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_model(**{"num_microbatches": 2, "schedule": LAST_FIRST, **arguments})


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        (("0F0 0B0", "1F0"), "lacks backward of stage 1, microbatch 0"),
        (("0F0 0B0 0B0", "1F0 1B0"), "Received twice: backward of stage 0, microba"),
        (("0F0 0B0", "1B0 1F0"), "deadlocks: .*, which comes behind it on device 1"),
    ],
)
def test_a_schedule_that_cannot_be_run(orders, words):
    plan = Schedule(2, 1, tuple(map(order, orders)))
    with pytest.raises(ValueError, match=words):
        make_model(num_microbatches=1, schedule=plan)


def test_the_model_that_is_pipelined_predicts_with_the_weights_as_they_are():
    inputs = keras.Input((4,))
    hidden = layers.Dense(4)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    x, y = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
    model.predict(x, verbose=0)  # Traces.
    pipelined = tfgpipe.pipeline(model, num_stages=2, num_microbatches=2)
    pipelined.compile(keras.optimizers.SGD(0.5), "mse")
    pipelined.train_on_batch(x, y)
    expected = pipelined.predict(x, verbose=0)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-6)


class Batches(keras.utils.PyDataset):
    """Eight batches, of which each says so when it is asked for."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        rng = np.random.default_rng(0)
        self.x, self.y = rng.standard_normal((2, 8, 8, 4)).astype("float32")

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.x[index], self.y[index]


@pytest.mark.parametrize(
    ("workers", "shuffle"),
    nightly(itertools.product([1, 2], [False, True]), gate=[(1, True), (2, False)]),
)
def test_a_pydataset_is_taken_in_the_order_of_the_plain_model(workers, shuffle):
    def fitted(pipelined):
        keras.utils.set_random_seed(0)
        stack = [layers.Dense(4), layers.Dense(4)]
        model = keras.Sequential([keras.Input((4,)), *stack])
        if pipelined:
            model = tfgpipe.pipeline(model, num_stages=2, num_microbatches=2)
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=not pipelined)
        keras.utils.set_random_seed(1)
        model.fit(Batches(workers=workers), epochs=2, verbose=0, shuffle=shuffle)
        return model.get_weights()

    compare.assert_allclose(fitted(False), fitted(True), rtol=1e-4, atol=1e-6)


class KnownSizes(keras.layers.Layer):
    """Works for a known number of rows alone."""

    def call(self, x):
        if x.shape[0] is None:
            raise TypeError("int64 that does not match int32")
        return x


@pytest.mark.parametrize("num_rows", [6, 7])
def test_an_error_of_a_layer_is_raised_as_it_is(num_rows):
    x = np.ones((num_rows, 4), np.float32)
    stack = [KnownSizes(), keras.layers.Dense(4)]
    model = tfgpipe.PipelinedModel(stack, num_stages=2, num_microbatches=3)
    model.compile("sgd", "mse")
    if num_rows == 6:
        model.train_on_batch(x, x)
        return
    with pytest.raises(TypeError, match="int64 that does not match int32") as caught:
        model.train_on_batch(x, x)
    (note,) = caught.value.__notes__
    assert "on a microbatch of unknown size" in note


def test_a_model_predicts_by_its_own_weights_after_it_was_recut():
    keras.utils.set_random_seed(0)
    stack = [keras.layers.Dense(8) for _ in range(4)]
    model = tfgpipe.PipelinedModel(stack, num_stages=2, num_microbatches=2)
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).random((8, 8), "float32")
    model.predict(x, verbose=0)
    tfgpipe.recut(model, [1, 3])
    model.train_on_batch(x, 0 * x)
    expected = keras.Sequential(stack).predict(x, verbose=0)
    predicted = model.predict(x, verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)


def test_a_stage_ends_with_the_last_call_of_the_layer_that_is_named():
    inputs, shared = keras.Input((4,)), keras.layers.Dense(4, name="shared")
    x = shared(keras.layers.Dense(4)(shared(inputs)))
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    pipelined = tfgpipe.pipeline(model, num_microbatches=2, partition=["shared"])
    assert [len(stage.segment.calls) for stage in pipelined.stages] == [3, 1]


def test_threads_may_trace_a_model_at_the_same_time():
    """One trains while others evaluate and predict, each for the first time."""

    def made() -> keras.Model:
        keras.utils.set_random_seed(0)
        norms = [keras.layers.BatchNormalization() for _ in range(2)]
        stack = [keras.layers.Dense(8), norms[0], keras.layers.Dense(8), norms[1]]
        model = tfgpipe.PipelinedModel(
            stack, num_stages=2, num_microbatches=2, batch_norm="deferred"
        )
        model.build((None, 8))
        model.compile("sgd", "mse", metrics=["mae"])
        # Keras itself cannot make variables of metrics in two threads.
        keras_internals.compiled.build_compiled(model, (x, x))
        return model

    x = np.random.default_rng(0).random((16, 8), "float32")
    alone, shared = made(), made()
    alone.fit(x, x, batch_size=8, shuffle=False, verbose=0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with futures.ThreadPoolExecutor() as threads:
            for each in [
                threads.submit(
                    shared.fit, x, x, batch_size=8, shuffle=False, verbose=0
                ),
                threads.submit(shared.evaluate, x, x, verbose=0),
                threads.submit(shared.predict, x, verbose=0),
            ]:
                each.result(120)
    finally:
        sys.setswitchinterval(interval)
    compare.assert_equal(alone.variables, shared.variables)
