"""Weights in slices over replicas (FSDP)."""

from __future__ import annotations

import collections
import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.replicas import (
    X,
    Y,
    assert_trains_the_same,
    loaded_whole,
    made,
    strategy_of,
)

layers = keras.layers
# Two replicas of four stages, two on each device.
TWO_EACH = [f"CPU:{i}" for i in (0, 1, 0, 1, 2, 3, 2, 3)]
SLICED = 128  # A square of it is larger than what stays whole.


def stack():
    return [
        layers.Dense(SLICED, activation="tanh"),
        layers.Dense(SLICED, activation="tanh", kernel_regularizer="l2"),
        layers.Dense(SLICED, activation="tanh"),
        layers.Dense(3),
    ]


def in_slices(model):
    """Returns the model's weights that are in slices, each with its slices."""
    strategy = model.distribute_strategy
    slices = [(v, strategy.copies(v.value)) for v in model.trainable_variables]
    return [(v, some) for v, some in slices if len(some) > 1]


SCHEDULE = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.01, 0.005])
OPTIMIZERS = {
    "clipnorm, decay, averages, accumulation": lambda: keras.optimizers.AdamW(
        SCHEDULE,
        weight_decay=0.1,
        clipnorm=0.05,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=2,
        gradient_accumulation_steps=2,
    ),
    "scaled, clipped by all weights": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, global_clipnorm=0.05), dynamic_growth_steps=3
    ),
    "momentum, clipped entries": lambda: keras.optimizers.SGD(
        0.05, momentum=0.9, nesterov=True, clipvalue=0.001
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_they_train_as_the_plain_model(floatx, optimizer):
    floatx("float64")
    model = made(optimizer, stack, strategy=strategy_of())
    assert [v.shape for v, _ in in_slices(model)] == [(SLICED, SLICED)] * 2
    assert_trains_the_same(made(optimizer, stack), model, measures=False)


def test_slices_of_unequal_lengths(floatx):
    floatx("float64")
    model = made(make=stack, strategy=strategy_of(3), schedule="zero_bubble")
    ((_, slices), *_) = in_slices(model)
    assert [v.shape.as_list() for v in slices] == [[n, SLICED] for n in (42, 43, 43)]
    assert_trains_the_same(made(make=stack), model)


@pytest.mark.parametrize("name", ["looped_bfs+gather", "interleaved_zb+gather"])
def test_weights_gathered_for_some_passes_at_a_time(floatx, name):
    floatx("float64")
    strategy = strategy_of(num_stages=4, devices=TWO_EACH)
    model = made(make=stack, strategy=strategy, schedule=name, num_microbatches=4)
    assert_trains_the_same(made(make=stack), model)


def bytes_by_device(model):
    """Returns how many bytes of weights and slots each device has."""
    strategy = model.distribute_strategy
    held = collections.Counter()
    for v in (*model.trainable_variables, *model.optimizer.variables):
        for copy in strategy.copies(v.value) if len(v.shape) else ():
            held[copy.device[-5:]] += copy.shape.num_elements() * copy.dtype.size
    return held


@pytest.mark.parametrize("d", [2, 4])
def test_a_device_holds_its_part_of_weights_and_slots(d):
    strategy = strategy_of(d, num_stages=1)
    model = made(make=stack, strategy=strategy, compiled={"loss": "mse"})
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    held = bytes_by_device(model)
    whole = 3 * sum(v.numpy().nbytes for v in model.trainable_variables)  # With Adam's.
    assert len(held) == d
    assert max(held.values()) < 1.05 * whole / d


def test_they_are_saved_and_loaded_whole_by_any_number_of_replicas(tmp_path):
    model = made(make=stack, strategy=strategy_of(3))
    model.fit(X, Y, batch_size=9, verbose=0)
    assert in_slices(loaded_whole(model, stack, strategy_of(2), tmp_path))


@pytest.mark.nightly
def test_a_cut_that_moves_takes_slices_along(floatx):
    floatx("float64")
    strategy = strategy_of()
    recut = made(make=stack, strategy=strategy, partition=[1, 3])
    plain = made(make=stack)
    assert_trains_the_same(plain, recut, measures=False)
    with strategy.scope():
        tfgpipe.recut(recut, [2, 2])
    moved = recut.stages[0].layers[-1].kernel
    assert {v.device[-5:] for v in strategy.copies(moved.value)} == {"CPU:0", "CPU:2"}
    assert_trains_the_same(plain, recut, measures=False)


def test_a_layer_in_another_model(floatx):
    """Keras takes the gradient of each weight by its handle."""
    floatx("float64")

    def model(strategy=None):
        compare.fresh_names()
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            inside = stack()
            if strategy:
                inside = [tfgpipe.PipelinedLayer(inside, num_microbatches=2)]
            found = keras.Sequential([keras.Input((6,)), *inside, layers.Dense(3)])
            found.compile(keras.optimizers.Adam(0.01), "mse")
        return found

    received = model(strategy_of())
    assert len(in_slices(received)) == 2
    rows = {"x": X[:16], "y": Y[:16]}  # Keras weighs replicas alike.
    assert_trains_the_same(model(), received, measures=False, **rows)


@pytest.mark.nightly
def test_stages_of_two_shards(floatx):
    floatx("float64")

    def sharded(num_shards):
        return [
            layers.Dense(SLICED, activation="tanh"),
            tfgpipe.layers.TPDense(2 * SLICED, num_shards=num_shards),
            layers.Dense(3),
        ]

    strategy = strategy_of(num_shards=2)
    model = made(make=lambda: sharded(2), strategy=strategy)
    assert len(in_slices(model)) == 2
    plain = made(make=lambda: sharded(1))
    for each in (plain, model):
        each.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    for each in (X, X[:3]):
        compare.close(plain.predict(each), model.predict(each), "output", 1e-9, 1e-10)


def test_what_is_not_in_slices():
    def constrained():
        return [
            layers.Dense(SLICED),
            layers.Dense(SLICED, kernel_constraint="max_norm"),
            layers.Dense(SLICED, trainable=False),
            layers.Dense(3),
        ]

    assert in_slices(made(make=constrained, strategy=strategy_of())) == []


@pytest.mark.parametrize("name", ["Adafactor", "Lamb", "Muon"])
def test_an_optimizer_that_looks_at_whole_weights(name):
    optimizer = getattr(keras.optimizers, name)
    with pytest.raises(ValueError, match=rf'{name}.*shard_replicas="whole_weights"'):
        made(optimizer, stack, strategy=strategy_of())


def test_a_saved_model_is_not_made_of_slices(tmp_path):
    model = made(make=stack, strategy=strategy_of())
    with pytest.raises(NotImplementedError, match="in slices on 2 devices"):
        tf.saved_model.save(model.unpipelined(), str(tmp_path / "saved"))


@pytest.mark.usefixtures("mixed_precision")
def test_slices_in_half_precision_train_as_the_plain_model():
    """Casts of weights are made anew of what is gathered."""
    strategy = strategy_of(num_stages=4, devices=TWO_EACH)

    def sgd():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    plain = made(sgd, stack)
    model = made(sgd, stack, strategy=strategy, schedule="looped_bfs+gather")
    assert len(in_slices(model)) == 2
    plain.run_eagerly = True
    x, y = X.astype("float32"), Y.astype("float32")
    for each in (plain, model):
        each.fit(x, y, batch_size=8, shuffle=False, epochs=2, verbose=0)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    for a, b in zip(plain.variables, model.variables, strict=True):
        # As of whole weights: see `test_data_parallel`.
        np.testing.assert_allclose(a.numpy(), b.numpy(), 0, 2e-3)


@pytest.mark.nightly
def test_a_table_that_stages_share(floatx):
    """Each stage gathers it for itself; microbatches wait on the host meanwhile."""
    floatx("float64")

    def model(strategy=None):
        compare.fresh_names()
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            inputs = keras.Input((12,), dtype="int32")
            embedding = layers.ReversibleEmbedding(600, 24)
            x = embedding(inputs)
            for _ in range(3):
                x = layers.Dense(24, activation="tanh")(x)
            found = keras.Model(inputs, embedding(x, reverse=True))
            if strategy:
                found = tfgpipe.pipeline(
                    found, num_microbatches=2, schedule="interleaved+offload+gather"
                )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            found.compile(keras.optimizers.Adam(0.01), loss)
        return found

    strategy = strategy_of(num_stages=4, devices=TWO_EACH)
    received = model(strategy)
    assert len(in_slices(received)) == 1
    rng = np.random.default_rng(0)
    data = {name: rng.integers(0, 600, (16, 12)) for name in "xy"}
    assert_trains_the_same(model(), received, **data)
