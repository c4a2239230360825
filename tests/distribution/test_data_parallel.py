"""Replicas of a pipeline, against one plain model that has all their rows."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.marks import nightly
from tests.helpers.replicas import (
    RTOL,
    WEIGHTS,
    X,
    Y,
    adam,
    assert_trains_the_same,
    made,
    short_stack,
    stack,
)

layers = keras.layers


CASES = [
    # D, K, M, schedule, remat, whether they evaluate and predict.
    (3, 2, 3, "1f1b", "stage", True),
    (2, 2, 2, "zero_bubble", "layer", False),
    *nightly(
        [
            (2, 2, 2, "gpipe", "stage", True),
            (2, 2, 4, "1f1b", "none", True),
            (2, 3, 3, "zero_bubble", "none", True),
            (4, 1, 2, "gpipe", "none", True),
            (1, 4, 4, "1f1b", "except_last", True),
        ]
    ),
]


@pytest.mark.parametrize(("d", "k", "m", "schedule", "remat", "measures"), CASES)
def test_replicas_are_one_that_has_all_rows(floatx, d, k, m, schedule, remat, measures):
    floatx("float64")
    strategy = tfgpipe.PipelineStrategy(num_stages=k, num_replicas=d)
    make = stack if k > 2 else short_stack
    arguments = {"num_microbatches": m, "schedule": schedule, "remat": remat}
    replicated = made(make=make, strategy=strategy, **arguments)
    assert_trains_the_same(made(make=make), replicated, measures=measures)


def test_replicas_of_interleaved_stages(floatx):
    floatx("float64")
    devices = ["CPU:0", "CPU:1", "CPU:0", "CPU:1", "CPU:2", "CPU:3", "CPU:2", "CPU:3"]
    strategy = tfgpipe.PipelineStrategy(
        num_stages=4, num_replicas=2, devices=devices, all_reduce="ring"
    )
    replicated = made(strategy=strategy, schedule="interleaved")
    assert_trains_the_same(made(), replicated, measures=False)


@pytest.mark.parametrize("d", [3, *nightly([2])])
def test_rows_weigh_alike_whatever_their_replica(floatx, d):
    floatx("float64")
    compiled = {
        "loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        "weighted_metrics": ["mae"],
    }
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=d)
    arguments = {"make": short_stack, "compiled": compiled}
    replicated = made(strategy=strategy, **arguments)
    weights = {"sample_weight": WEIGHTS}
    assert_trains_the_same(made(**arguments), replicated, **weights)


def test_a_loss_that_is_a_sum(floatx):
    floatx("float64")
    compiled = {"loss": keras.losses.MeanSquaredError(reduction="sum")}

    def sgd():
        return keras.optimizers.SGD(0.001)

    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2)
    replicated = made(sgd, short_stack, strategy=strategy, compiled=compiled)
    plain = made(sgd, short_stack, compiled=compiled)
    assert_trains_the_same(plain, replicated, measures=False)


@pytest.mark.parametrize("d", [2, *nightly([4])])
def test_a_batch_smaller_than_the_number_of_replicas(floatx, d):
    floatx("float64")
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=d)
    replicated = made(make=short_stack, strategy=strategy)
    data = {"x": X[:9], "y": Y[:9]}
    assert_trains_the_same(made(make=short_stack), replicated, **data)


def momentum():
    return keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.1)


OPTIMIZERS = {
    "decay": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "averages of all": lambda: keras.optimizers.Adam(
        0.05, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=2
    ),
    "scaled on all": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), dynamic_growth_steps=3
    ),
    "clipnorm": lambda: keras.optimizers.Adam(0.05, clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.01),
    "global_clipnorm": momentum,
    "accumulation": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
    "averages": lambda: keras.optimizers.Adam(
        0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05, global_clipnorm=0.1), dynamic_growth_steps=3
    ),
    "schedule": lambda: keras.optimizers.Adam(
        # Others are computed in single precision.
        keras.optimizers.schedules.PiecewiseConstantDecay([3, 7], [0.05, 0.03, 0.01])
    ),
    # Those whose arithmetic is of a whole weight, not of its entries one by one.
    "adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "lamb": lambda: keras.optimizers.Lamb(0.05),
}
SHARED = {
    "clipvalue": "slots",
    "global_clipnorm": "weights",
    "accumulation": "slots",
    "averages": "weights",
    "scaled": "slots",
    "adafactor": "whole_weights",
    "lamb": "slots",
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_work_on_what_all_replicas_sum_up_to(floatx, name):
    floatx("float64")
    strategy = tfgpipe.PipelineStrategy(
        num_stages=2, num_replicas=2, shard_replicas=SHARED.get(name, "none")
    )
    optimizer = OPTIMIZERS[name]
    replicated = made(optimizer, strategy=strategy)
    assert_trains_the_same(made(optimizer), replicated, measures=False)


@pytest.mark.usefixtures("mixed_precision")
@pytest.mark.parametrize("shares", ["weights", *nightly(["none"])])
def test_replicas_in_half_precision_train_as_one(shares):
    """Loss scaling comes with it. What is rounded is so in other places."""

    def bare():
        return [layers.Dense(8, activation="tanh"), layers.Dense(3)]

    strategy = strategy_of(shard_replicas=shares)

    def sgd():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    plain, replicated = made(sgd, bare), made(sgd, bare, strategy=strategy)
    plain.run_eagerly = True
    x, y = X.astype("float32"), Y.astype("float32")
    for model in (plain, replicated):
        model.fit(x, y, batch_size=8, shuffle=False, epochs=2, verbose=0)
    assert isinstance(replicated.optimizer, keras.optimizers.LossScaleOptimizer)
    for a, b in zip(plain.variables, replicated.variables, strict=True):
        assert b.dtype == "float32"
        # Half precision keeps 3 digits of gradients of about one tenth.
        np.testing.assert_allclose(a.numpy(), b.numpy(), 0, 2e-3)


@pytest.mark.parametrize("all_reduce", ["ring", *nightly(["reduce"])])
def test_a_loop_of_ones_own(floatx, all_reduce):
    """Each replica's gradients are of its own rows; clipped is their sum."""
    floatx("float64")
    optimizer = momentum
    plain = keras.Sequential([keras.Input((6,)), *stack()])
    expected = optimizer()
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = compare.squares(plain(X, training=True))
        gradients = tape.gradient(loss, plain.trainable_variables)
        expected.apply(gradients, plain.trainable_variables)
    compare.fresh_names()
    keras.utils.set_random_seed(0)
    strategy = tfgpipe.PipelineStrategy(
        num_stages=2, num_replicas=2, all_reduce=all_reduce
    )
    with strategy.scope():
        layer = tfgpipe.PipelinedLayer(stack(), num_microbatches=3)
        layer.build((None, 6))
        received = optimizer()
        tfgpipe.place_optimizer(received)
    halves = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(np.split(X, 2)[context.replica_id_in_sync_group])
    )

    @tf.function
    def step(x):
        def on_replica(x):
            with tf.GradientTape() as tape:
                y = layer(x, training=True)
                # The same loss of each row as if all were together.
                first = 11 * tf.cast(
                    tf.distribute.get_replica_context().replica_id_in_sync_group,
                    tf.int32,
                )
                numbers = first * 3 + tf.reshape(tf.range(tf.size(y)), tf.shape(y))
                c = tf.cast(numbers % 7 + 1, y.dtype)
                loss = tf.reduce_sum(c * y * y) / Y.size
            weights = layer.trainable_variables
            received.apply(tape.gradient(loss, weights), weights)

        strategy.run(on_replica, args=(x,))

    for _ in range(3):
        step(halves)
    for a, b in zip(plain.trainable_variables, layer.trainable_variables, strict=True):
        compare.close(a.numpy(), b.numpy(), a.path, 1e-10, 1e-12)


class Logs(keras.callbacks.Callback):
    """Notes what is shown of each batch: the means so far."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(list(logs.values()))


def test_what_is_shown_of_a_batch_is_of_all_replicas(floatx):
    floatx("float64")
    shown = []
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=4)
    replicated = made(make=short_stack, strategy=strategy)
    for model in (made(make=short_stack), replicated):
        logs = Logs()
        fit = {"batch_size": 3, "shuffle": False, "verbose": 0, "callbacks": [logs]}
        model.fit(X[:7], Y[:7], **fit)
        shown.append(logs.seen)
    np.testing.assert_allclose(shown[1], shown[0], RTOL)


@pytest.mark.parametrize("eagerly", [False, *nightly([True])])
def test_losses_of_several_outputs_weigh_rows_alike(floatx, eagerly):
    floatx("float64")
    found = []
    for d in (0, 3):
        compare.fresh_names()
        keras.utils.set_random_seed(0)
        strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=3)
        with strategy.scope() if d else contextlib.nullcontext():
            inputs = keras.Input((6,))
            hidden = layers.Dense(4, activation="tanh")(inputs)
            outputs = [layers.Dense(3, name=name)(hidden) for name in "ab"]
            model = keras.Model(inputs, outputs)
            if d:
                model = tfgpipe.pipeline(model, num_microbatches=1)
            model.compile("sgd", ["mse", "mae"], run_eagerly=eagerly)
        fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
        found.append(model.fit(X, [Y, Y], **fit).history)
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, RTOL)


def test_a_generator_loses_no_batch_once_all_is_built():
    """Keras counts one step more than there are batches."""
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    steps = []
    for model in (made(make=short_stack), made(make=short_stack, strategy=strategy)):
        counts = []
        for _ in range(2):
            batches = ((X[i : i + 4], Y[i : i + 4]) for i in (0, 4, 8))
            model.fit(batches, verbose=0)
            counts.append(int(model.optimizer.iterations.numpy()))
        steps.append(counts[1] - counts[0])
    assert steps[0] == steps[1]


# -- randomness -----------------------------------------------------------------------


def test_replicas_drop_other_units():
    def masks(d, rows):
        keras.utils.set_random_seed(0)
        strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=d)
        with strategy.scope():
            layer = tfgpipe.PipelinedLayer(
                [layers.Dropout(0.5), layers.Dropout(0.5)], num_microbatches=2
            )
            layer.build((None, 50))

        @tf.function
        def step():
            return strategy.run(lambda: layer(tf.ones((rows, 50)), training=True))

        steps = [strategy.experimental_local_results(step()) for _ in range(2)]
        for seed in layer.non_trainable_variables:
            copies = strategy.experimental_local_results(seed.value)
            for copy in copies:  # So that a checkpoint is that of any.
                np.testing.assert_array_equal(copy.numpy(), copies[0].numpy())
        return [tuple(x.numpy().tobytes() for x in made) for made in steps]

    alone, together = masks(1, 4), masks(3, 4)
    # The first replica draws what one alone would.
    assert [mine for mine, *_ in together] == [mine for (mine,) in alone]
    drawn = [mask for step in together for mask in step]
    assert len(set(drawn)) == 6


# -- what is refused ------------------------------------------------------------------


def strategy_of(**arguments):
    return tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2, **arguments)


def test_what_strategies_refuse():
    words = r"one of 'reduce', 'ring', 'nccl'. Received 'hierarchical'. .* odd numbers"
    with pytest.raises(ValueError, match=words):
        strategy_of(all_reduce="hierarchical")
    with pytest.raises(ValueError, match="Received 'all'"):
        strategy_of(shard_replicas="all")
    with pytest.raises(
        ValueError, match=r"sums over GPUs. Received devices of type CPU"
    ):
        strategy_of(all_reduce="nccl")
    with pytest.raises(ValueError, match="all_reduce='ring' with shard_replicas='slo"):
        strategy_of(all_reduce="ring", shard_replicas="slots")


def largest(y, p):
    return tf.reduce_max(tf.abs(y - p))


class LargestSoFar(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros")

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(tf.maximum(self.value, largest(y, p)))

    def result(self):
        return self.value


@pytest.mark.parametrize("metric", [lambda: largest, LargestSoFar])
def test_metrics_that_replicas_cannot_share_are_refused(metric):
    with (strategy := strategy_of()).scope():
        compiled = {"loss": "mse", "metrics": [metric()]}
    model = made(make=short_stack, strategy=strategy, compiled=compiled)
    words = "cannot be taken over replicas.*Received 'largest'"
    with pytest.raises(ValueError, match=words):
        model.fit(X, Y, batch_size=8, verbose=0)


def test_more_devices_than_there_are_places_are_refused():
    words = "2 stages x 2 replicas need 4 devices, one each. Received 5: CPU:0, CPU:1"
    with pytest.raises(ValueError, match=words):
        strategy_of(devices=[f"CPU:{i}" for i in range(5)])


def test_other_strategies_and_optimizers_are_refused():
    with (
        compare.mirrored(2).scope(),
        pytest.raises(ValueError, match="Received one under MirroredStrategy"),
    ):
        tfgpipe.place_optimizer(adam())
    optimizer = keras.optimizers.MultiOptimizer([(adam(), lambda v: True)])
    with strategy_of().scope(), pytest.raises(ValueError, match="Received MultiOptimi"):
        tfgpipe.place_optimizer(optimizer)


def test_strategies_cannot_be_nested():
    words = "cannot be nested. Received a PipelineStrategy made inside the scope of a M"
    with compare.mirrored(2).scope(), pytest.raises(RuntimeError, match=words):
        strategy_of()
    words = "Received a MultiWorkerPipelineStrategy made inside the scope of a Pipel"
    with strategy_of().scope(), pytest.raises(RuntimeError, match=words):
        tfgpipe.MultiWorkerPipelineStrategy(num_stages=2)


def test_an_optimizer_from_outside_the_scope_is_refused():
    optimizer = adam()
    with strategy_of().scope():
        model = tfgpipe.PipelinedModel(short_stack(), num_microbatches=2)
        model.build((None, 6))
        model.compile(optimizer, "mse")
    words = (
        r"made inside `with strategy.scope\(\):`. Received 'adam', of which 'adam/ite"
    )
    with pytest.raises(RuntimeError, match=words):
        model.fit(X, Y, batch_size=8, verbose=0)
