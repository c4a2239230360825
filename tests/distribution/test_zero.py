"""What replicas share out, and optimizers that work on it."""

from __future__ import annotations

import collections

import keras
import pytest

import tfgpipe
from tests.helpers import compare
from tests.helpers.replicas import (
    X,
    Y,
    assert_trains_the_same,
    loaded_whole,
    made,
    short_stack,
    strategy_of,
)

layers = keras.layers


# What is on all replicas or shared out, and several options that have nothing to do
# with each other; `test_data_parallel` has them one by one.
OPTIMIZERS = {
    "clipnorm, decay, averages, accumulation on all": (
        lambda: keras.optimizers.AdamW(
            keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.05, 0.01]),
            weight_decay=0.1,
            clipnorm=0.1,
            use_ema=True,
            ema_momentum=0.9,
            ema_overwrite_frequency=2,
            gradient_accumulation_steps=2,
        ),
        "none",
    ),
    "scaled with slots shared out": (
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.05, clipvalue=0.01), dynamic_growth_steps=3
        ),
        "slots",
    ),
    # The arithmetic is of a whole weight, not of its entries one by one.
    "adafactor with weights shared out": (
        lambda: keras.optimizers.Adafactor(0.05),
        "whole_weights",
    ),
}


@pytest.mark.parametrize(("optimizer", "shares"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_work_on_what_all_replicas_sum_up_to(floatx, optimizer, shares):
    floatx("float64")
    strategy = strategy_of(shares=shares)
    replicated = made(optimizer, short_stack, strategy=strategy)
    plain = made(optimizer, short_stack)
    assert_trains_the_same(plain, replicated, measures=False)


# -- memory ---------------------------------------------------------------------------


def held(model):
    """Returns how many bytes of weights and of slots each device holds."""
    strategy = model.distribute_strategy
    weights, slots = collections.Counter(), collections.Counter()
    for counter, variables in (
        (weights, model.trainable_variables),
        (slots, [v for v in model.optimizer.variables if len(v.shape)]),
    ):
        for variable in variables:
            for copy in strategy.experimental_local_results(variable.value):
                counter[copy.device[-5:]] += copy.shape.num_elements() * 4
    return weights, slots


@pytest.mark.parametrize("shares", ["none", "slots", "weights"])
def test_replicas_share_out_what_they_need_not_have_twice(shares):
    def square():
        return [layers.Dense(6, use_bias=False) for _ in range(4)]

    strategy = strategy_of(shares=shares)
    model = made(make=square, strategy=strategy, compiled={"loss": "mse"})
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    weights, slots = held(model)
    matrix = 6 * 6 * 4  # Each stage has two, and Adam as much again for each twice.
    assert set(weights) == {"CPU:0", "CPU:1", "CPU:2", "CPU:3"}
    assert set(weights.values()) == {matrix * (1 if shares == "weights" else 2)}
    assert set(slots.values()) == {2 * matrix * (2 if shares == "none" else 1)}


@pytest.mark.parametrize("shares", ["slots", "weights"])
def test_what_is_shared_out_is_saved_and_loaded_whole(tmp_path, shares):
    strategy = strategy_of(shares=shares)
    model = made(make=short_stack, strategy=strategy, num_microbatches=3)
    model.fit(X, Y, batch_size=8, verbose=0)
    loaded_whole(model, short_stack, strategy, tmp_path)


@pytest.mark.nightly
def test_a_cut_that_moves_takes_along_what_is_shared_out():
    strategy = strategy_of()
    recut, left = (made(strategy=strategy, partition=[1, 3]) for _ in range(2))
    for model in (recut, left):
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    with strategy.scope():
        tfgpipe.recut(recut, [2, 2])
    for model in (recut, left):
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    compare.assert_close(left.variables, recut.variables, 1e-5, 1e-6)
    moved = recut.stages[0].layers[-1].trainable_variables
    slots = [
        v
        for v in recut.optimizer.variables
        if any(w.path.replace("/", "_") in v.name for w in moved)
    ]
    assert {v.value.device[-5:] for v in moved} <= {"CPU:0", "CPU:2"}
    held = sum(strategy._zero._held.values())
    with strategy.scope():
        for balance in ([1, 3], [2, 2]):
            tfgpipe.recut(recut, balance)
    assert sum(strategy._zero._held.values()) == held
    assert {v.value.device[-5:] for v in slots} <= {"CPU:0", "CPU:2"}
